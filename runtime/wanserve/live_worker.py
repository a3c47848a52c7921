"""A live job in its worker: each chunk is encoded and written while the next one is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from wanrun import Outcome, Progress, Result, Timings
from wanrun.errors import CancelledError
from wanrun.job.outcome import plain
from wanrun.media.boxes import mime_type
from wanrun.media.live_video import LiveVideo, live_video, one_behind
from wanserve.live_files import LiveFiles, Piece
from wanserve.messages import Fragment, Go, Going, Steer

if TYPE_CHECKING:
    from wanrun import CancelToken, Chunk, Generation, Job, Live, Pipeline
    from wanrun.media.inputs import Inputs


class LiveChunks:
    """Makes the chunks of a live job, as far as the server lets it."""

    def __init__(self, going: Going, send: Callable[[Fragment], None]) -> None:
        self._going, self._send = going, send
        self._changed = threading.Condition()
        self._most, self._prompt = 0, None  # type: int, str | None
        self._live: Live | None = None

    def take(self, message: Go | Steer) -> None:
        """Lets it make more chunks, or changes the prompt from the next one on; from any thread."""
        with self._changed:
            if isinstance(message, Go):
                self._most = max(self._most, message.chunks)
                self._changed.notify_all()
                return
            self._prompt = message.prompt
            if self._live is not None:
                self._live.send(prompt=message.prompt)

    def run(self, pipeline: Pipeline, job: Job, progress: Progress, token: CancelToken) -> Outcome:
        """Makes chunks until the end, or until it is cancelled, and returns how the job ended.

        With a chunk made, a cancelled job has ended well: that is how a video without end ends. Raises
        CancelledError if it is cancelled before.
        """
        generation, inputs, last = job.generation, None, None
        if generation.media is not None:
            with progress.timings.phase("read_media"):
                inputs = generation.read_media(cancel=token)
        metadata = self._metadata(pipeline, generation, inputs)
        with progress.timings.phase("live"), _writing(job, metadata, self._send, progress.part) as write:
            try:
                with closing(self._made(pipeline, generation, inputs, token)) as chunks:
                    for chunk in chunks:
                        write(chunk)
                        last = chunk
            except CancelledError:
                if last is None:
                    raise
        progress.stop()
        metadata["num_frames"] = 0 if last is None else last.first + last.frames.shape[1]
        if last is not None:
            _picture(job, "last_frame", last, metadata)
        warnings = [*generation.warnings, *(() if inputs is None else inputs.warnings)]
        return progress.outcome(metadata=plain(metadata), warnings=warnings)

    def _metadata(self, pipeline: Pipeline, generation: Generation, inputs: Inputs | None) -> dict[str, Any]:
        """Returns the metadata of the video, without its length: nobody knows yet when it ends."""
        here = pipeline.artifact.built_here(generation.profile.name)
        metadata = generation.metadata(inputs, pipeline.artifact.influences | here)
        del metadata["num_frames"]  # those of the profile
        return metadata

    def _made(
        self, pipeline: Pipeline, generation: Generation, inputs: Inputs | None, token: CancelToken
    ) -> Generator[Chunk]:
        """Yields the chunks as the server lets them be made, up to the length of the job."""
        going, number = self._going, 0
        most = going.seconds * generation.fps
        with pipeline.run_live(generation, inputs=inputs, max_frames=going.frames, cancel=token) as live:
            with self._changed:
                self._live = live
                if self._prompt is not None:
                    live.send(prompt=self._prompt)
            try:
                while self._may(number, token) and (chunk := next(live, None)) is not None:
                    yield chunk
                    number += 1
                    if chunk.first + chunk.frames.shape[1] >= most:
                        return
            finally:
                with self._changed:
                    self._live = None

    def _may(self, number: int, token: CancelToken) -> bool:
        """Waits until the chunk of a number may be made; raises CancelledError instead."""

        def tell() -> None:
            with self._changed:
                self._changed.notify_all()

        with token.ending(tell), self._changed:
            self._changed.wait_for(lambda: token.cancelled or number < self._most)
        token.check()
        return True


class _Files:
    """Writes the chunks of a job, one after the other, and reports each to the server.

    ``took`` gets the timings of each chunk, with its encoding. ``parts`` are what the encoder has made, which
    is taken from there.
    """

    def __init__(
        self,
        job: Job,
        metadata: dict[str, Any],
        send: Callable[[Fragment], None],
        took: Callable[[Timings], None],
        parts: list[bytes],
    ) -> None:
        self._job, self._metadata, self._send, self._took, self._parts = job, metadata, send, took, parts
        self._files, self._media_type = LiveFiles(job.outputs[0].path), ""

    def write(self, video: LiveVideo, chunk: Chunk) -> None:
        """Encodes and writes a chunk; of the first one a picture too."""
        with chunk.timings.phase("encode_video"):
            video.write(chunk.frames[0])
        self._took(chunk.timings)
        if chunk.number == 0:
            head = self._parts.pop(0)
            self._files.begin(head)
            self._media_type = mime_type(head)
        data, frames = self._parts.pop(), chunk.frames.shape[1]
        self._files.add(Piece(chunk.number, chunk.first, frames), data)
        self._send(
            Fragment(
                id=self._job.id,
                number=chunk.number,
                first=chunk.first,
                frames=frames,
                nbytes=len(data),
                seconds=chunk.seconds,
                prompt=chunk.prompt,
                media_type=self._media_type,
            )
        )
        if chunk.number == 0:
            _picture(self._job, "thumbnail", chunk, self._metadata)


@contextmanager
def _writing(
    job: Job, metadata: dict[str, Any], send: Callable[[Fragment], None], took: Callable[[Timings], None]
) -> Iterator[Callable[[Chunk], None]]:
    """Yields a function that writes chunks on another thread, while the next one is made."""
    parts, profile = list[bytes](), job.generation.profile
    files = _Files(job, metadata, send, took, parts)
    size = profile.width, profile.height
    with (
        live_video(parts.append, size, job.generation.fps, metadata) as video,
        one_behind(partial(files.write, video)) as write,
    ):
        yield write


def _picture(job: Job, kind: str, chunk: Chunk, metadata: dict[str, Any]) -> None:
    """Writes a picture of a chunk, if the job has one of this kind."""
    shown = Result(chunk.frames, chunk.latents, metadata, Timings())
    for output in job.outputs:
        if output.kind == kind:
            output.write(shown, metadata, True)
