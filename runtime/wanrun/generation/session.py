"""One profile of an opened artifact: loads what its videos need, and warms it up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import DECODERS, FORMS, ROLES
from wanrun.denoising.latents import check_latents
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.steps import Denoising, ExpertRange, opening, transformers, velocity_table
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.conditioning import Conditioning, LastEncoded
from wanrun.generation.decoding import LatentDecoder
from wanrun.generation.futures import unfinished, when_done
from wanrun.generation.sampler import Sampler
from wanrun.generation.step import OnStep, TinyDecoder, telling
from wanrun.machine.memory import Machine
from wanrun.media.inputs import Inputs
from wanrun.opened.policy import LoadPolicy
from wanrun.request.adapters import applied_loras
from wanrun.request.generation import Generation
from wanrun.request.options import resolve_loop
from wanrun.text.stage import TextStages
from wanrun.text.tokenizer import clean_prompt
from wanrun.timing.timings import Timings
from wanrun.weights.bound_programs import Programs
from wanrun.weights.experts import Division, Placement, choose_placement
from wanrun.weights.store import WeightStore


def first_expert(manifest: Manifest, policy: LoadPolicy) -> str:
    """Returns the transformer that is needed first. Raises UsageError if the policy names an unknown one."""
    names = transformers(manifest)
    if policy.first_expert not in (None, *names):
        raise UsageError(
            "wrong_type",
            "first_expert is not a transformer of this artifact",
            expected=" or ".join(names),
            found=repr(policy.first_expert),
        )
    return policy.first_expert or names[0]


class Session(Sampler):
    """Makes videos of one profile. A session holds no weights, and its constructor reads none.

    ``loop`` is the default form of the denoising loop: that of ``load``, if the profile is built with it.
    ``placement`` says where two experts are kept; None for a model with one transformer. The constructor
    raises ArtifactError if the profile is not compiled for the target, and UsageError for an unknown first
    expert.
    """

    def __init__(self, weights: WeightStore, texts: TextStages, last: LastEncoded, profile: Profile) -> None:
        opened = weights.opened
        manifest, policy = opened.manifest, opened.policy
        if not policy.allow_compile and profile.name not in opened.selected.target.executables:
            raise ArtifactError(
                "not_built",
                f"profile {profile.name} is not compiled for target {opened.selected.name}",
                remedy=f"run {opened.artifact.compiling(profile)}",
            )
        loop = policy.form if policy.form in profile.options.forms else None
        self.loop = resolve_loop(opened.artifact, profile, loop)
        self._opened, self._experts = opened, transformers(manifest)
        self._first_expert = first_expert(manifest, policy)
        self._form = FORMS[self.loop]
        self.placement = None if self._form.streams else _place(weights, profile)
        kind = "both" if self.placement is None else self.placement.kind
        kind = "stream" if self._form.streams else kind
        weights.keep_on_host(self._experts if kind == "host" else ())
        programs = Programs(profile, weights, experts=self._experts, placement=kind)
        conditioning = Conditioning(programs, manifest, profile, last, policy.low_memory)
        super().__init__(programs, manifest, profile, conditioning)
        self.text = texts.of(programs, profile.options.dtype)
        self._text_expected = True

    def report(self, first: Session) -> None:
        """Reports where two experts are kept, unless the pipeline's first session keeps them there too."""
        if self.placement is None or first.placement is None:
            return
        if self is first:
            self._opened.report(self.placement.describe())
        elif self.placement.kind != first.placement.kind:
            self._opened.report(f"{self.profile.name}, {self.placement.describe()}")

    def of_video(self, latents: np.ndarray) -> np.ndarray:
        """Returns the latents of a video without the leading frames, which they may have.

        Raises UsageError for another shape or dtype.
        """
        _, *shape = self.latents_shape
        if self.of_any_length and latents.ndim == 5:
            shape[1] = latents.shape[2]
        if list(latents.shape[1:]) == shape:
            latents = latents[:, :, self.leading :]
        shape[1] -= self.leading
        check_latents(latents, (*latents.shape[:1], *shape), "the latents")
        return latents

    def describe(self, timings: Timings) -> None:
        """Records in the timings of a call the target, and where the experts are kept."""
        timings.target = self._opened.selected.name
        if self.placement is not None:
            timings.placement = self.placement.kind

    def start(self, prompts: Sequence[str] | None, inputs: Inputs | None, timings: Timings) -> None:
        """Loads until the first step can run; parts for after the steps start to load during the second one.

        Prompts and inputs are those of ``load``. Raises ArtifactError if a needed part is missing or damaged.
        """
        text, waiting = self.text, list[Future[Any]]()
        missing = self._start_text(prompts, waiting, timings)
        conditioned = inputs is not None or self.conditioning.needed
        if conditioned:
            waiting += self.conditioning.request_weights()
        if self._form.streams:
            waiting.append(self.programs.streamed(self._first_expert).outside)
        else:
            waiting += self.programs.request(components=[self._first_expert])
        if missing:
            waiting += text.encoder.request(text.tokenizer(missing).lengths)
        if conditioned:  # after the text encoder's programs, because the text is encoded first
            waiting += self.conditioning.request_programs()
        waiting += self.programs.request(programs=self.programs.with_role(*self._form.roles))
        when_done(waiting, timings.mark_ready)
        if missing:
            with timings.phase("text"):
                text.prompts.fetch(missing)
                waiting = unfinished(waiting)  # finished futures would keep the text encoder in memory
                text.spare()
        if inputs is not None:
            self.conditioning(inputs, timings=timings)
            waiting = unfinished(waiting)
        for future in waiting:
            self._opened.waits.result(future)

    def _start_text(
        self, prompts: Sequence[str] | None, waiting: list[Future[Any]], timings: Timings
    ) -> list[str]:
        """Starts to load the text stage, and returns the prompts that are to be encoded meanwhile."""
        text, low = self.text, self._opened.policy.low_memory
        if prompts is None:
            text.tokenizer.load()
            if not low:
                waiting += text.encoder.request()
            return []
        missing = [clean_prompt(prompt) for prompt in text.prompts.missing(prompts)]
        if not missing:
            self._text_expected = False
            return []
        text.tokenizer.start(missing)
        waiting += text.encoder.request(())
        if low:  # text encoder and transformer are not in memory together
            waiting.clear()
            text.encode(missing, timings)
            return []
        return missing

    def load_behind(self, decoder: str | None = None) -> None:
        """Requests a decoder's program and weights, for after the last step; raises a failed load's error."""
        programs = self.programs.with_role(*DECODERS[decoder or "full"])
        components = [name for program in programs for name in self.programs.components(program)]
        unfinished(self.programs.request(programs=programs, components=components))

    def tiny_decoder(self, decoder: str | None) -> TinyDecoder | None:
        """Returns the decoder of previews for a video of this decoder; None for one that does not load it."""
        if decoder != "tiny" or self._opened.device.group is not None:
            return None
        figures = self._opened.selected.target.statistics.get(self.profile.name, {})
        made, own = (self.programs.with_role(*one) for one in (self._form.makers, (DECODERS[decoder],)))
        if any("flops" not in figures.get(name, {}) for name in (*made, *own)):
            return None
        steps = sum(figures[name]["flops"] for name in own) / max(figures[name]["flops"] for name in made)
        return TinyDecoder(lambda latents: self.decode(latents, Timings(), decoder)[0], steps)

    def loop_of(
        self,
        generation: Generation,
        timings: Timings,
        on_step: OnStep,
        check: Callable[[], object],
        last: bool,
    ) -> Denoising:
        """Returns the denoising loop of a generation of this profile, as yet without embeddings.

        ``check`` is called after each step, and as frames leave the decoder; what it raises ends the
        generation. ``last`` says that no other generation follows. Raises ArtifactError if the file of a LoRA
        is missing, damaged or not the chosen one, and UsageError for an ``on_step`` that takes neither two
        arguments nor three.
        """
        decoder, blending = generation.options.get("decoder"), generation.blending
        first = opening(generation.options, self._opened.manifest)
        tiny = self.tiny_decoder(decoder) if blending is None else None
        return Denoising(
            generation.table,
            generation.ranges,
            np.empty(0),
            generation.options["loop"],
            timings,
            behind=partial(self.load_behind, decoder),
            on_step=telling(on_step, self._opened.manifest, self.profile, tiny, check),
            loras=applied_loras(generation.loras, self._opened.artifact),
            blending=blending,
            check=check,
            last=last,
            opening=first,
            longer=0 if first is None else len(first[0].timesteps) - len(generation.table.timesteps),
            chunks=generation.chunks,
        )

    def warm_up_text(self) -> None:
        """Runs the text encoder once, unless ``start`` had the embeddings of all given prompts."""
        if self._text_expected:
            self.text.warm_up()

    def warm_up(self, timings: Timings) -> None:
        """Executes every program except the text encoder's once, with every expert; records no step.

        Of the forms of the loop only that of ``load`` is executed, of it every program that makes steps.
        """
        embeddings = self.text.blank(1)
        stages = self._opened.manifest.model.stages
        noise, table = initial_noise(0, self.latents_shape), velocity_table(500.0, stages)
        conditions = self.conditioning.blank()
        # All experts run, whatever a boundary and flow_shift would choose; the first of the next run is last.
        for expert in sorted(self._experts, key=lambda name: name == self._first_expert):
            steps = [ExpertRange.alike(expert, 0, stages, 1.0)]
            for maker in (name for name in self._form.makers if ROLES[name].warm):
                run = Denoising(table, steps, embeddings, self.loop, Timings(), maker=maker)
                latents = self.denoise(run, noise, conditions, Noise(0))
        self.decode(latents[:1, :, self.leading :][:, :, : LatentDecoder(self.programs).enough], timings)


class Sessions:
    """The sessions of an opened artifact, one for each profile that has made something."""

    def __init__(self, weights: WeightStore, texts: TextStages) -> None:
        self._shared, self._last = (weights, texts), LastEncoded()
        self._made, self._making = dict[str, Session](), threading.Lock()

    def of(self, profile: Profile) -> Session:
        """Returns the session of a profile, and makes it at the first call; raises what ``Session`` does."""
        with self._making:
            if profile.name not in self._made:
                session = Session(*self._shared, self._last, profile)
                session.report(next(iter(self._made.values()), session))
                self._made[profile.name] = session
            return self._made[profile.name]

    def forget(self) -> None:
        """Drops the last images and videos, and their encodings."""
        self._last.clear()


def _place(weights: WeightStore, profile: Profile) -> Placement | None:
    """Returns where two experts are kept while a profile runs; None for a single transformer."""
    opened = weights.opened
    if len(transformers(opened.manifest)) == 1:
        return None
    mesh, division = opened.device.mesh, None
    devices = [opened.device.device] if mesh is None else mesh.local_devices
    if mesh is not None:
        transfers = {name: weights.mesh_transfer(name) for name in opened.manifest.components}
        footprints = {name: one.footprint for name, one in transfers.items() if one is not None}
        division = Division(mesh.size, len(devices), footprints)
    return choose_placement(
        opened.manifest,
        opened.programs(profile),
        opened.selected.target.statistics.get(profile.name, {}),
        Machine.of(*devices),
        opened.policy,
        division,
    )
