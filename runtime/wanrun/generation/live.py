"""Live video: chunks of frames as they are made, with a prompt that may change on the way."""

from __future__ import annotations

__all__ = ["Chunk", "Live"]

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Self, TypedDict, Unpack

import numpy as np

from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.errors import CancelledError, UsageError, field, wrong_type
from wanrun.generation.chunks import ChunkLoop, ChunkNoise
from wanrun.generation.decoding import LatentDecoder
from wanrun.generation.session import Session
from wanrun.media.inputs import Inputs
from wanrun.opened.cancel import CancelToken
from wanrun.request.arguments import array_of, check_objects
from wanrun.request.generation import Generation
from wanrun.request.lengths import check_live, check_start, live_chunks
from wanrun.timing.timings import Timings


@dataclass(frozen=True)
class Chunk:
    """Some frames of a live video.

    Attributes:
        number: of the chunk, from 0.
        first: the number of its first frame in the video, from 0.
        frames: uint8 (1, F, H, W, 3).
        latents: that they are decoded from, float32 (1, C, T, h, w).
        prompt: that they were made by.
        seconds: from when it was asked for to its frames, with waiting for the device.
        timings: what took how long.
    """

    number: int
    first: int
    frames: np.ndarray
    latents: np.ndarray
    prompt: str
    seconds: float
    timings: Timings


class Asked(TypedDict, total=False):
    """The keywords of a live video.

    ``max_frames`` is None for no end. ``inputs`` are images and videos that were already read. ``latents``
    are initial noise of its first chunks, float32 (1, C, T, h, w), or None for the seed's. ``cancel`` ends
    the video with a CancelledError.
    """

    max_frames: int | None
    inputs: Inputs | None
    latents: np.ndarray | None
    cancel: CancelToken | None


@dataclass(frozen=True)
class LiveAccess:
    """The functions of a pipeline that a live video may use.

    ``call`` counts a call as inside the pipeline while the block runs. ``turn`` waits for the device, and
    holds it while the block runs. ``encode`` returns the embeddings of prompts.
    """

    call: Callable[[Timings, CancelToken], AbstractContextManager[object]]
    turn: Callable[[Timings, CancelToken], AbstractContextManager[object]]
    encode: Callable[[Session, Sequence[str], Timings], np.ndarray]


class Live:
    """A video that is made while it is watched: an iterator of chunks, made by ``Pipeline.live``.

    Other calls may have the device between two chunks. Who takes chunks slowly slows the device, and no more
    than one chunk waits in memory. ``send`` and ``close`` may be called from any thread.

    Args:
        generation: what is made.
        session: of its profile.
        device: the pipeline's.
        asked: see ``Asked``.

    Attributes:
        generation: the argument, with the first prompt.

    Raises:
        UsageError: for a model that makes a video at once, for frames that are no whole latent frames, and
            for latents that are of no whole chunks.
    """

    def __init__(
        self,
        generation: Generation,
        session: Session,
        device: LiveAccess,
        **asked: Unpack[Asked],
    ) -> None:
        frames, latents, cancel = asked.get("max_frames"), asked.get("latents"), asked.get("cancel")
        inputs = asked.get("inputs")
        check_objects(cancel=cancel, inputs=inputs)
        check_live(generation.manifest, frames, decoder=generation.options.get("decoder"))
        if (asked := generation.options["num_frames"]) != generation.profile.num_frames:
            raise UsageError(
                "invalid_value",
                f"{field('num_frames')} of a live video are those of a profile",
                expected=generation.profile.num_frames,
                found=asked,
                remedy="pass max_frames",
            )
        if latents is not None:
            check_start(generation, frames, latents := array_of(latents))
        self.generation = generation
        self._given, self._closed, self._turn = cancel, False, threading.Lock()
        self._making = _Making(generation, session, device, frames, latents, inputs)
        self._chunks = self._making.chunks()

    def send(self, *, prompt: str) -> None:
        """Changes the prompt, from the chunk on that is begun next.

        Raises:
            UsageError: for a prompt that is no text.
        """
        if not isinstance(prompt, str):
            raise wrong_type("prompt", "a string", prompt)
        self._making.prompt = prompt

    def close(self) -> None:
        """Ends the video: the chunk that is being made ends after its step, and the next one is the end.

        What chunks see of those before is freed, on the device too.
        """
        self._closed = True
        self._making.stop.cancel()
        if self._turn.acquire(blocking=False):  # else a chunk is being made, and ends itself
            try:
                self._chunks.close()
            finally:
                self._turn.release()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Returns the next chunk.

        Raises:
            StopIteration: after the last one, and after ``close``.
            ArtifactError: if something that is needed is missing or damaged.
            CancelledError: once ``cancel`` is cancelled.
            UsageError: after the pipeline is closed.
            WanError: if the latents are not finite.
        """
        stop = self._making.stop.cancel
        ending = nullcontext() if self._given is None else self._given.ending(stop)
        try:
            with ending, self._turn:
                chunk = next(self._chunks)
                if self._closed:  # meanwhile, and it could not end what was being made
                    self._chunks.close()
                return chunk
        except CancelledError:
            if self._closed:
                raise StopIteration from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Making:
    """Makes the chunks of a live video. It refers to no generator: one that is dropped is freed at once.

    ``frames`` is None for no end; ``latents`` are the initial noise of its first chunks, None for the seed's.
    ``prompt`` makes the next chunk; ``stop`` ends the video.
    """

    def __init__(
        self,
        generation: Generation,
        session: Session,
        device: LiveAccess,
        frames: int | None,
        latents: np.ndarray | None,
        inputs: Inputs | None,
    ) -> None:
        self._generation, self._session, self._device = generation, session, device
        self._total, self._latents, self._inputs = frames, latents, inputs
        self.prompt, self.stop = str(generation.options["prompt"]), CancelToken()

    def chunks(self) -> Generator[Chunk]:
        """Yields the chunks."""
        session, options = self._session, self._generation.options
        noise, embeddings, embedded = Noise(options["seed"]), np.empty(0), ""
        shape, alone = session.latents_shape, session.chunks.alone
        # What a whole video of the profile would begin with; later chunks draw their own.
        latents = noise(shape) if self._latents is None and not alone else self._latents
        starts = ChunkNoise(latents, shape, noise)
        decoder = LatentDecoder(session.programs, check=self.stop.check)
        loop: ChunkLoop | None = None
        first = 0
        for number, length in enumerate(live_chunks(self._generation, self._total)):
            timings, asked, prompt = Timings.from_now(), time.perf_counter(), self.prompt
            self.stop.check()
            if number == 0 and self._inputs is None and self._generation.media is not None:
                with timings.phase("read_media"):  # before the device is held
                    self._inputs = self._generation.read_media(cancel=self.stop)
            if prompt != embedded:
                with self._device.call(timings, self.stop):
                    # With guidance a negative prompt is behind it, which stays.
                    texts = [prompt, *self._generation.prompts[1:]]
                    embeddings, embedded = self._device.encode(session, texts, timings), prompt
            run = session.loop_of(self._generation, timings, _nothing, self.stop.check, last=False)
            run = replace(run, embeddings=embeddings, window=number, windows=number + 1)
            with self._device.call(timings, self.stop), self._device.turn(timings, self.stop):
                loop = loop or ChunkLoop(session, self._conditions(timings), noise)
                latents = loop(run, starts(length))
                with timings.phase("decode"):
                    frames = np.concatenate([*decoder(latents[0], further=number > 0 and not alone)])[None]
            timings.stop()
            if self._total is not None:
                frames = frames[:, : self._total - first]
            yield Chunk(number, first, frames, latents, prompt, time.perf_counter() - asked, timings)
            first += frames.shape[1]

    def _conditions(self, timings: Timings) -> Conditions:
        """Returns the inputs from images, which are kept no longer."""
        inputs, self._inputs = self._inputs, None
        return self._session.conditioning(inputs, timings=timings, options=self._generation.options)


def _nothing(done: int, total: int) -> None:
    pass
