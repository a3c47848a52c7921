"""An opened artifact that makes videos of any of its built profiles, with one copy of the weights.

The runtime restores weights, loads executables, and runs them in order. It has no model code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import DecoderName
from wanrun.artifact.select import UnbuiltError
from wanrun.denoising.latents import check_latents
from wanrun.generation.agreement import agree_on_generation
from wanrun.generation.decoding import OnFrames, Telling
from wanrun.generation.live import Asked, Live, LiveAccess
from wanrun.generation.result import Result
from wanrun.generation.session import Session, Sessions
from wanrun.generation.step import OnStep
from wanrun.generation.turns import Turns
from wanrun.generation.video_parts import VideoParts, spool_for
from wanrun.media.inputs import Inputs, Media
from wanrun.opened.cancel import CancelToken
from wanrun.request.arguments import array_of, check_objects, texts_of
from wanrun.request.building import build_beside
from wanrun.request.elsewhere import no_attribute
from wanrun.request.generation import Generation, check_resolved, influences_of
from wanrun.request.keywords import Options
from wanrun.request.options import check_decoder
from wanrun.request.resolve import request_of, resolve_request
from wanrun.terminal.status import Status
from wanrun.text.encoder import Warn, silent
from wanrun.text.stage import TextStages
from wanrun.timing.timings import Timings
from wanrun.weights.store import WeightStore


class Pipeline:
    """An artifact on its device; made by ``load``.

    Every method may be called from any thread. Images and videos are read, and prompts encoded, while other
    calls run. What needs the device (encoding images and videos, steps, decoding, warm-up) is done for one
    call at a time, in the order of arrival; where memory is low, so are prompts. ``close`` ends the calls
    that wait for the device, and all later ones, with a UsageError. In a fork of the process every call ends
    with one. An error in one thread does not affect the others. ``on_step`` is called by the thread that has
    the device, and cannot ask for it again. Each call records its times in ``timings`` if they are given;
    ``generate`` otherwise in its result.

    Attributes:
        artifact: the artifact.
        manifest: its manifest.
        profile: the loaded profile.
        timings: the times of loading it.
    """

    def __init__(
        self, weights: WeightStore, texts: TextStages, profile: Profile, timings: Timings, progress: bool
    ) -> None:
        self._showing: Callable[[Any], AbstractContextManager[object]] = Status if progress else nullcontext
        self._weights, self._texts, self._opened = weights, texts, weights.opened
        self.artifact, self.manifest = self._opened.artifact, self._opened.manifest
        self.profile, self.timings = profile, timings
        self._turns, self._sessions = Turns(), Sessions(weights, texts)
        self._session = self._sessions.of(profile)
        self._session.describe(timings)

    def __repr__(self) -> str:
        what = f"{self.manifest.model.variant}, {self.profile.name} for {self._opened.selected.name}"
        return f"<Pipeline of {what}, in {self.artifact}>"

    if not TYPE_CHECKING:  # for a type checker there is nothing of this

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("Pipeline", name)

        def __call__(self, *_: object, **__: object) -> Any:
            raise TypeError("a Pipeline is not called; pipeline.generate(PROMPT, ...) makes a video")

    def session(self, profile: Profile) -> Session:
        """Returns the session of a built profile, and makes it at the first call.

        Raises:
            ArtifactError: if the profile cannot run here.
            UsageError: after ``close``.
        """
        with self._turns.call():
            return self._sessions.of(profile)

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the loaded profile's initial latents, with frames of reference images."""
        return self._session.latents_shape

    def start(
        self, prompts: Sequence[str] | None, inputs: Inputs | None = None, cancel: CancelToken | None = None
    ) -> None:
        """Loads the profile until its first step could run, unless loading is lazy; arguments as of ``load``.

        Raises:
            ArtifactError: if something that is needed is missing or damaged.
            CancelledError: once ``cancel`` is cancelled.
            UsageError: after ``close``.
        """
        with self._call(self.timings, cancel):
            if not self._opened.policy.lazy:
                self._session.start(prompts, inputs, self.timings)

    def encode_prompts(self, prompts: Sequence[str], timings: Timings | None = None) -> np.ndarray:
        """Embeddings (P, 512, text_dim) of these prompts, in the compute dtype, zero past each length."""
        with self._call(timings) as timings:
            return self._encode(self._session, texts_of(prompts), timings, self._opened.warn)

    def component_weights(self, name: str) -> Mapping[str, Any]:
        """Returns a component's weights on the device, as nested dicts by path."""
        with self._turns.call():
            return self._weights.weights(name)

    @property
    def environment(self) -> Mapping[str, Any]:
        """The facts about where programs run, as of a target's environment."""
        return self._opened.environment

    def load_executables(self, profile: Profile | None = None) -> None:
        """Loads every executable of a profile, or the loaded one, whether or not a generation needs it.

        Raises:
            ArtifactError: if one cannot be loaded.
        """
        programs = self.session(profile or self.profile).programs
        with self._call(None):
            for loading in programs.request(programs=programs):
                loading.result()

    def encoded_at_lengths(self, prompt: str) -> dict[int, np.ndarray]:
        """Returns a prompt's embedding (tokens of the prompt, text_dim) by each program that it fits.

        The keys are the lengths of the artifact's text encoder programs, shortest first.
        """
        with self._call(None) as timings, self._text(timings):
            return self._session.text.at_lengths(prompt)

    def decode(
        self, latents: np.ndarray, timings: Timings | None = None, decoder: DecoderName = "full"
    ) -> np.ndarray:
        """Decodes normalised float32 latents (B, C, T, h, w) to uint8 frames (B, F, H, W, 3), one by one.

        The latents may have the frames of reference images in front, as the initial ones of a generation do.
        A ``tiny`` decoder needs an artifact that has one; else it is a UsageError.
        """
        check_decoder(self.artifact, decoder)
        latents = self._session.of_video(array_of(latents))
        with self._call(timings) as timings, self._turns.device(timings):
            return self._session.decode(latents, timings, decoder)[0]

    def warmup(self, timings: Timings | None = None) -> None:
        """Executes every program of the loaded profile once, and with every expert.

        The first generation then has no cost of a first execution. Of the two forms of the loop only the form
        of ``load`` is executed. The text encoder is left out if ``load`` had embeddings of all given prompts.
        """
        with self._call(timings) as timings, timings.phase("warmup"):
            with self._text(timings):
                self._session.warm_up_text()
            with self._turns.device(timings):
                self._session.warm_up(timings)

    def generate(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        media: Media | None = None,
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        on_step: OnStep = lambda done, total: None,
        on_frames: OnFrames | None = None,
        timings: Timings | None = None,
        cancel: CancelToken | None = None,
        spool: Path | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Makes a profile's number of videos for one prompt: ``resolve`` and ``run``, whose errors it has.

        The profile is the loaded one, unless the options (profile, size, num_frames, num_videos,
        guidance_scale) or the number of reference images select another. That profile is loaded at its first
        use, with the same weights; one that is lacking is built as ``resolve`` does.

        Args:
            prompt: description of the video.
            negative_prompt: description of what the video must not show; None for the manifest's default.
                Unused without guidance.
            media: the images and videos that the model takes, as files or in memory.
            inputs: the same, already read by ``load_media``. If the same object is given again, it is not
                encoded again.
            latents: initial noise instead of the seed's, float32 (B, C, T, h, w).
            on_step: called after each program call with the number of steps done and the total; one of three
                parameters with a ``Step`` too, which has the latents and a preview.
            on_frames: gets the frames of each video while later ones are decoded, in the thread that has the
                device, and the result has none; None for frames in the result.
            timings: where the times are recorded; None for new ones in the result.
            cancel: ends the generation when another thread asks for it.
            spool: as for ``run``.
            options: fields of ``Request`` by name, such as ``seed`` and ``num_steps``; None for the default.
        """
        given: dict[str, Any] = {"latents": latents, "on_step": on_step, "on_frames": on_frames}
        with self._call(timings, cancel) as timings:
            generation = self.resolve(prompt, negative_prompt, media=media, inputs=inputs, **options)
            return self.run(generation, inputs=inputs, **given, timings=timings, cancel=cancel, spool=spool)

    def resolve(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        media: Media | None = None,
        inputs: Inputs | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Checks a request, and returns what ``run`` would make of it, and cost; runs and reads nothing.

        It is ``wanrun.resolve`` with the loaded profile, and the form of the loop that was loaded, as
        defaults. Arguments are those of ``generate``. On a CPU a pipeline that was loaded with ``build=True``
        builds the profile first if it is lacking, in its turn for the device.

        Raises:
            UsageError: for an argument of another type, an option that is unknown, out of range, or without
                effect, and images and videos that are missing or not taken.
            ArtifactError: if no such profile is built, or not with this form of the loop.
        """
        check_objects(media, inputs)
        request = request_of({"prompt": prompt, "negative_prompt": negative_prompt, **options})
        what = (media, inputs, self.profile, self._opened.policy.form)
        try:
            return resolve_request(request, self.artifact, *what)
        except UnbuiltError as error:
            if not self._opened.policy.build:
                raise
            self._build(error)
        return resolve_request(request, self.artifact, *what)

    def _build(self, error: UnbuiltError) -> None:
        opened, cancel = self._opened, self._opened.waits.token
        with self._turns.call(), self._turns.turn(cancel), self._showing(lambda: opened.recorder.running):
            if error.lacking.name not in self.manifest.profiles:  # else another thread has built it meanwhile
                build_beside(opened, error, cancel)
                self.artifact, self.manifest = opened.artifact, opened.manifest

    def run(
        self,
        generation: Generation,
        *,
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        on_step: OnStep = lambda done, total: None,
        on_frames: OnFrames | None = None,
        timings: Timings | None = None,
        warn: Warn = silent,
        cancel: CancelToken | None = None,
        spool: Path | None = None,
        overwrite: bool = False,
        last: bool = False,
    ) -> Result:
        """Makes the videos of a resolved request.

        Args:
            generation: what is made, of ``resolve`` or ``wanrun.resolve``.
            inputs: its images and videos, if they were already read.
            latents, on_step, on_frames, timings, cancel: as for ``generate``.
            warn: gets each warning of the result that is found during the work, at once.
            spool: folder of the frames of several clips, or text-only windows, from which the same
                generation goes on after an end; the result's frames are mapped files of it. None keeps them
                in memory, as those of all other videos and of several processes are.
            overwrite: whether those of another video in it are replaced; else they are an error.
            last: whether no other generation follows: the text encoder is released once the prompts are
                encoded, and the transformers before the videos are decoded. Another one loads them again.

        Raises:
            UsageError: for an argument of another type, a generation of another artifact, latents of a wrong
                shape, or images and videos that cannot be used; after ``close``, and in a fork of the
                process.
            ArtifactError: if something that is needed is missing or damaged.
            CancelledError: once ``cancel`` is cancelled.
            WanError: if the latents are not finite.
        """
        functions = {"on_step": on_step, "on_frames": on_frames or silent, "warn": warn}
        check_objects(inputs=inputs, timings=timings, cancel=cancel, **functions)
        check_resolved(generation, self.manifest)
        latents, told = None if latents is None else array_of(latents), list(generation.warnings)

        def tell(warning: str) -> None:
            told.append(warning)
            warn(warning)

        token = cancel or CancelToken()
        token.check()
        with self._call(timings, cancel) as timings:
            session = self.session(generation.profile)
            session.describe(timings)
            loop = session.loop_of(generation, timings, on_step, token.check, last)
            if inputs is None and generation.media is not None:
                with timings.phase("read_media"):
                    inputs = generation.read_media(cancel=cancel)
            for warning in () if inputs is None else inputs.warnings:
                tell(warning)
            group = self._opened.device.group
            agree_on_generation(group, generation, inputs, latents)
            if latents is not None:
                check_latents(latents, generation.latents_shape)
            here = self.artifact.built_here(generation.profile.name)
            facts = generation.metadata(inputs, self.artifact.influences | influences_of(latents) | here)
            frames = generation.counts(inputs).frames
            take = None if on_frames is None else Telling(on_frames, frames, facts, group is not None)
            folder = spool if group is None and generation.in_parts else None
            parts = (
                VideoParts(take) if folder is None else spool_for(generation, folder, facts, take, overwrite)
            )
            with parts, self._showing(lambda: timings.running):
                loop = replace(loop, embeddings=self._encode(session, generation.prompts, timings, tell))
                if last:
                    session.text.encoder.release()
                with self._turns.device(timings, cancel):
                    made, final = session(loop, generation.options, inputs, latents, parts)
                if take is not None:
                    take.finish()
        leading = final[:, :, : session.leading] if session.leading else None
        return Result(made, final[:, :, session.leading :], facts, timings, tuple(told), leading)

    def live(
        self,
        prompt: str,
        *,
        media: Media | None = None,
        max_frames: int | None = None,
        latents: np.ndarray | None = None,
        cancel: CancelToken | None = None,
        **options: Unpack[Options],
    ) -> Live:
        """Returns the chunks of one video, of a model that makes them one by one, as they are asked for.

        Its frames are ``max_frames``, None for no end. ``latents`` are the initial noise of as many chunks as
        they have frames, float32 (1, C, T, h, w), instead of the seed's. For the others, and errors, see
        ``resolve``.
        """
        generation = self.resolve(prompt, media=media, **options)
        return self.run_live(generation, max_frames=max_frames, latents=latents, cancel=cancel)

    def run_live(self, generation: Generation, **asked: Unpack[Asked]) -> Live:
        """Returns the chunks of a resolved request's video, as ``live``; ``inputs`` as for ``run``."""
        check_resolved(generation, self.manifest)
        device = LiveAccess(self._call, self._turns.device, self._encode)
        return Live(generation, self.session(generation.profile), device, **asked)

    @contextmanager
    def _call(self, timings: Timings | None, cancel: CancelToken | None = None) -> Iterator[Timings]:
        """Runs a call. Loading meanwhile is recorded in its timings, or in new ones that end with it."""
        check_objects(timings=timings)
        own = timings if timings is not None else Timings.from_now()
        with self._turns.call(), self._opened.recorder.into(own), self._opened.waits.until(cancel):
            yield own
        if timings is None:
            own.stop()

    def _text(self, timings: Timings) -> AbstractContextManager[None]:
        """Lets the text encoder run beside another call's steps; with low memory, holds the device for it."""
        return self._turns.device(timings) if self._opened.policy.low_memory else nullcontext()

    def _encode(
        self, session: Session, prompts: Sequence[str], timings: Timings, warn: Warn = silent
    ) -> np.ndarray:
        with self._text(timings):
            return session.text.encode(prompts, timings, warn)

    def close(self) -> None:
        """Waits until the running calls end, then releases weights and executables.

        In a fork of the process it does nothing: weights and executables are the parent's.

        Raises:
            UsageError: if it is called inside a generation by the generation's own thread.
        """
        if not self._turns.forked:
            self._turns.close()
            self._sessions.forget()
            self._texts.close()
            self._weights.close()

    def __enter__(self) -> Self:
        with self._turns.call():
            return self

    def __exit__(self, *error: object) -> None:
        self.close()
