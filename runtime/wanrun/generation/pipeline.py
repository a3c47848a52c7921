"""An opened artifact that makes videos: any of its built profiles, over one copy of the weights.

The runtime restores, loads executables, and runs them in order. It knows no model code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import numpy as np
from msgspec import structs

from wanrun.artifact.export_age import age_warning
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_profile, select_target
from wanrun.denoising.expert_loop import Denoising
from wanrun.denoising.schedule import ExpertRange, schedule
from wanrun.denoising.steps import OnStep
from wanrun.generation.choice import asked_for, chosen_profile, media_asked_for
from wanrun.generation.options import check_latents, has_guidance, resolve_loop, resolve_options
from wanrun.generation.request import Request
from wanrun.generation.result import Result
from wanrun.generation.session import Session, check_profile, first_expert
from wanrun.generation.shared import Shared
from wanrun.generation.turns import Turns
from wanrun.loading.buffers import Memory
from wanrun.loading.device import open_device
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.policy import LoadChoices, LoadPolicy, ProfileChoices
from wanrun.media.types import Inputs, Media
from wanrun.timing import Recorder, Timings

Tell = Callable[[str], None]


def _silent(message: str) -> None:
    del message


class Pipeline:
    """An artifact on its device; made by ``load``.

    Every method may be called from any thread.

    | part of a call | runs | waits for |
    |---|---|---|
    | reading images and videos, encoding prompts | beside any other | nothing |
    | encoding images and videos, steps, decoding, warm-up | one at a time | those that came before it |
    | ``close`` | last | every call that has the device or needs none |

    So the device is one generation's at a time, in the order of arrival, and the prompts of the next ones are
    encoded meanwhile; but where memory is low, one at a time and in order too. ``close`` ends the calls that
    wait for the device, and all later ones, with a UsageError. An error in one thread is no matter of the
    others. ``on_step`` is called by the thread that has the device: from there it cannot be asked for again.
    Calls record what they take in the ``timings`` that they are given; ``generate`` else in its result's.

    Pipelines of one process are independent, but for what JAX has one of in a process: of all of them one
    executable is loaded at a time.

    Attributes:
        artifact: the artifact's folder.
        manifest: its manifest.
        profile: the profile that was loaded.
        timings: what loading it took.
    """

    def __init__(self, shared: Shared, profile: Profile, timings: Timings) -> None:
        self._shared, self._opened = shared, shared.opened
        self.artifact, self.manifest = self._opened.folder, self._opened.manifest
        self.profile, self.timings = profile, timings
        self._making, self._turns = threading.Lock(), Turns()
        self._sessions: dict[str, Session] = {}
        self._session = self.session(profile)
        self._session.describe(timings)

    def session(self, profile: Profile) -> Session:
        """The session of a built profile, made when it is first asked for.

        Raises:
            ArtifactError: if the profile cannot run here.
            UsageError: after ``close``.
        """
        with self._turns.call(), self._making:
            if profile.name not in self._sessions:
                session = Session(self._shared, profile)
                self._report(session)
                self._sessions[profile.name] = session
            return self._sessions[profile.name]

    def _report(self, session: Session) -> None:
        """Tells where a new session keeps two experts, unless the first session does the same."""
        placement, first = session.placement, next(iter(self._sessions.values()), session)
        if placement is None or first.placement is None:
            return
        if session is first:
            self._opened.report(placement.describe())
        elif placement.kind != first.placement.kind:
            self._opened.report(f"{session.profile.name}, {placement.describe()}")

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the loaded profile's latents."""
        return self._session.latents_shape

    def start(self, prompts: Sequence[str] | None, inputs: Inputs | None = None) -> None:
        """Loads the profile until its first step could run, unless loading is lazy; arguments as of ``load``.

        Raises:
            ArtifactError: if something that is needed is missing or damaged.
        """
        if not self._opened.policy.lazy:
            with self._opened.recorder.into(self.timings):
                self._session.start(prompts, inputs, self.timings)

    def encode_prompts(self, prompts: Sequence[str], timings: Timings | None = None) -> np.ndarray:
        """Embeddings (P, 512, text_dim) of these prompts, in the compute dtype, zero past each length."""
        with self._call(timings) as timings:
            return self._encode(self._session, prompts, timings)

    def component_weights(self, name: str) -> Mapping[str, Any]:
        """A component's weights on the device, as nested dicts by path."""
        with self._turns.call():
            return self._shared.weights.weights(name)

    def decode(self, latents: np.ndarray, timings: Timings | None = None) -> np.ndarray:
        """Normalised latents (B, C, T, h, w) to frames, uint8 (B, T, H, W, 3), one video at a time."""
        with self._call(timings) as timings, self._device(timings):
            return self._session.sampler.decode(latents, timings)[0]

    def velocity(
        self,
        latents: np.ndarray,
        prompts: Sequence[str],
        timestep: float,
        guidance_scale: float,
        transformer: str = "transformer",
        inputs: Inputs | None = None,
    ) -> np.ndarray:
        """The model's guided output at these latents, for comparing it with another implementation.

        Args:
            latents: float32 (B, C, T, h, w).
            prompts: positive, and with guidance negative.
            timestep: in training timesteps, 0 to 1000.
            guidance_scale: unused without guidance.
            transformer: which expert.
            inputs: images and videos, for one window.

        Returns:
            float32 of latents' shape, as exact as the dtype that the profile keeps latents in. A frame that
            is held has no velocity.
        """
        steps = ExpertRange(transformer, 0, 1, guidance_scale)
        with self._call(None) as timings:
            embeddings = self._encode(self._session, prompts, timings)
            with self._device(timings):
                return self._session.velocity(latents, embeddings, timestep, steps, inputs)

    def image_tokens(self, inputs: Inputs) -> np.ndarray:
        """What the image encoder makes of the images: (N, tokens, image_dim) in the compute dtype."""
        with self._call(None) as timings, self._device(timings):
            conditions = self._session.conditioning(inputs, timings=timings)
            return np.asarray(conditions.prepare["image_tokens"])

    def warmup(self, timings: Timings | None = None) -> None:
        """Executes every program once, and with every expert, so that the first request pays for nothing new.

        Of the loaded profile, and of the two forms of the loop the one that ``load`` was given. The text
        encoder is left out where ``load`` was told the prompts and had all their embeddings.
        """
        with self._call(timings) as timings, timings.phase("warmup"):
            with self._text(timings):
                self._session.warm_up_text()
            with self._device(timings):
                self._session.warm_up(timings)

    def generate(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        media: Media | None = None,
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        on_step: OnStep = lambda step, total: None,
        timings: Timings | None = None,
        **options: Any,
    ) -> Result:
        """Generates a profile's number of videos for one prompt.

        The profile is the one that was loaded, but for what the options say of size, num_frames, num_videos
        and guidance, and the media of their number of reference images. Another one is loaded when it is
        first asked for, over the same weights.

        Args:
            prompt: what to show.
            negative_prompt: what to avoid; the manifest's default where None. Unused without guidance.
            media: the images and videos that the model takes, as files or in memory.
            inputs: the same read already, by ``load_media``; given again as they are, they are not encoded
                again.
            latents: initial noise instead of the seed's, float32 (B, C, T, h, w).
            on_step: told after each call how many of how many steps are done.
            timings: where to record what it takes; the result's own where None.
            options: fields of ``Request`` by name, such as ``seed`` and ``num_steps``; None is the default.

        Raises:
            UsageError: for an option that is unknown, out of range, or without effect, latents of a wrong
                shape, or images and videos that are missing, not taken, or cannot be used.
            ArtifactError: if no such profile is built, or not with this form of the loop.
            WanError: if the latents are not finite.
        """
        named = {"prompt": prompt, "negative_prompt": negative_prompt, **options}
        request = asked_for(self.profile, named)
        media = media_asked_for(request, media, inputs)
        with self._call(timings) as timings:
            session = self._session_for(request, inputs if media is None else media)
            session.describe(timings)
            inputs = session.conditioning.read(media, inputs, request.segment_overlap, timings)
            resolved = self._resolved(session, request, inputs)
            table, ranges = schedule(resolved, self.manifest)
            if latents is not None:
                check_latents(latents, session.latents_shape)
            texts = [prompt, resolved["negative_prompt"]] if session.profile.guidance else [prompt]
            embeddings = self._encode(session, texts, timings)
            run = Denoising(
                table, ranges, embeddings, resolved["loop"], timings, session.load_behind, on_step
            )
            with self._device(timings):
                frames, final = session.sampler(run, resolved, inputs, latents)
        facts = self._facts(session.profile, resolved, inputs, frames)
        return Result(frames, final, facts, timings)

    @contextmanager
    def _call(self, timings: Timings | None) -> Iterator[Timings]:
        """A call: what is loaded meanwhile is recorded in its timings, or in new ones that end with it."""
        own = timings if timings is not None else Timings.from_now()
        with self._turns.call(), self._opened.recorder.into(own):
            yield own
        if timings is None:
            own.stop()

    @contextmanager
    def _device(self, timings: Timings) -> Iterator[None]:
        """Has the device for itself; what it had to wait for that is recorded."""
        asked = timings.now()
        with self._turns.turn() as waited:
            if waited:
                timings.add("wait", asked, timings.now())
            yield

    def _text(self, timings: Timings) -> AbstractContextManager[None]:
        """Runs the text encoder: beside the steps of another call, unless there is no memory for both."""
        return self._device(timings) if self._opened.policy.low_memory else nullcontext()

    def _encode(self, session: Session, prompts: Sequence[str], timings: Timings) -> np.ndarray:
        with self._text(timings):
            return session.text.encode(prompts, timings)

    def _session_for(self, request: Request, given: Media | Inputs | None) -> Session:
        """The session of the profile that a generation asks for."""
        built = self.manifest.profiles
        if not self._opened.policy.allow_compile:
            built = {name: built[name] for name in built.keys() & self._opened.target.executables.keys()}
        profile = chosen_profile(self.manifest, self.artifact, self.profile, built, request, given)
        return self.session(profile)

    def _resolved(self, session: Session, request: Request, inputs: Inputs | None) -> dict[str, Any]:
        """The options of a generation with all defaults filled in."""
        changes: dict[str, Any] = {"loop": request.loop or session.loop}
        if inputs is not None and self.manifest.model.task.windows is not None:
            changes["segment_overlap"] = inputs.segment_overlap
        return resolve_options(self.manifest, session.profile, structs.replace(request, **changes))

    def _facts(
        self, profile: Profile, options: Mapping[str, Any], inputs: Inputs | None, frames: np.ndarray
    ) -> dict[str, Any]:
        """What a video's metadata says of how it was made."""
        facts = {**options, **(inputs.facts if inputs else {}), "num_frames": frames.shape[1]}
        if self.manifest.model.task.windows is not None:
            facts["segment_frames"] = profile.num_frames
        return {**facts, "content_digest": self.manifest.content_digest}

    def close(self) -> None:
        """Lets go of weights and executables, when the generation that runs and its like have ended.

        Raises:
            UsageError: if it is called in the middle of a generation, from its own thread.
        """
        self._turns.close()
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    artifact: str | os.PathLike[str],
    *,
    prompts: Sequence[str] | None = None,
    inputs: Inputs | None = None,
    timings: Timings | None = None,
    warn: Tell = _silent,
    report: Tell = _silent,
    **choices: Unpack[LoadChoices],
) -> Pipeline:
    """Opens an artifact, and loads one profile until its first step could run; the VAE follows later.

    Args:
        artifact: the artifact's folder.
        prompts: the prompts, negative ones too, that are going to be used: they are encoded meanwhile, and
            the text encoder is not read if all their embeddings are at hand. None: any may come.
        inputs: the images and videos that are going to be used first, which are encoded meanwhile.
        timings: where to record what it took.
        warn: told what does not stop the run but should be known.
        report: told what was decided: where two experts are kept.
        choices: size, num_frames, num_videos, guidance, num_references and target choose what is loaded: see
            ``ProfileChoices``. allow_compile, verify, memory, loop, first_expert, text_encoder,
            text_encoder_device, embeddings, weights and lazy say how: see ``LoadPolicy``.

    Raises:
        ArtifactError: if the artifact is damaged, was built for another machine, or has no such profile.
        UsageError: for a choice that there is not, or a text encoder or weights that cannot be had.
    """
    folder, timings = Path(artifact).resolve(), Timings() if timings is None else timings
    wanted, policy = _sorted_out(choices)
    with timings.phase("manifest"):
        manifest = read_manifest(folder)
        profile = _wanted_profile(manifest, folder, wanted)
        selected = select_target(manifest, folder, profile, wanted.get("target"), policy.allow_compile)
    if old := age_warning(folder, manifest.program_sets[selected.target.program_set]):
        warn(old)
    check_profile(folder, profile, selected, policy)
    resolve_loop(profile, policy.loop)
    ahead, expert = dict[str, Memory](), first_expert(manifest, policy)
    with ExitStack() as undo:
        if not (policy.lazy or policy.low_memory):  # the text encoder may come first
            ahead[expert] = Memory(manifest.components[expert])
            ahead[expert].touch_ahead()  # while jax is imported
            undo.callback(ahead[expert].stop)
        device = open_device(selected, policy.allow_compile, timings, warn)
        undo.callback(device.close)
        opened = OpenedArtifact(folder, manifest, selected, device, policy, Recorder(), warn, report)
        pipeline = Pipeline(Shared.of(opened, ahead), profile, timings)
        undo.callback(pipeline.close)
        pipeline.start(prompts, inputs)
        undo.pop_all()
    return pipeline


def _sorted_out(choices: LoadChoices) -> tuple[ProfileChoices, LoadPolicy]:
    """What is to be loaded, and how."""
    given = cast("dict[str, Any]", choices)
    wanted = {name: given.pop(name) for name in ProfileChoices.__annotations__ if name in given}
    return cast("ProfileChoices", wanted), LoadPolicy(**given)


def _wanted_profile(manifest: Manifest, artifact: Path, wanted: ProfileChoices) -> Profile:
    guidance = wanted.get("guidance")
    return select_profile(
        manifest,
        artifact,
        wanted.get("size"),
        wanted.get("num_frames"),
        wanted.get("num_videos", 1),
        has_guidance(manifest) if guidance is None else guidance,
        wanted.get("num_references", 0),
    )
