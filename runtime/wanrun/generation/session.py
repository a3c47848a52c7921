"""One profile of an opened artifact: its programs in the order that makes a video."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget
from wanrun.denoising.expert_loop import Denoising, ExpertLoop
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.schedule import ExpertRange, transformers
from wanrun.denoising.steps import LOOP_PROGRAMS, velocity_table
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.conditioning import Conditioning
from wanrun.generation.options import latents_shape, loop_forms, resolve_loop
from wanrun.generation.sampler import Sampler
from wanrun.generation.shared import Shared
from wanrun.loading.executables import check_entries
from wanrun.loading.futures import unfinished, when_done
from wanrun.loading.machine import Machine
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.placement import Placement, choose_placement
from wanrun.loading.policy import LoadPolicy
from wanrun.loading.programs import Programs
from wanrun.media.types import Inputs
from wanrun.text.prompt import clean_prompt
from wanrun.timing import Timings


def check_profile(artifact: Path, profile: Profile, selected: SelectedTarget, policy: LoadPolicy) -> None:
    """Checks of a profile that cost nothing: neither jax nor a file's content is needed.

    Raises:
        ArtifactError: if it is not compiled for the target, or an executable is missing or has another size.
    """
    if not policy.allow_compile:  # or what is missing is compiled
        if profile.name not in selected.target.executables:
            raise ArtifactError(
                f"profile {profile.name} is not compiled for target {selected.name}",
                remedy="run wanbuild compile",
            )
        check_entries(artifact, selected.target, profile.name)


def first_expert(manifest: Manifest, policy: LoadPolicy) -> str:
    """The transformer that is needed first.

    Raises:
        UsageError: if the policy names one that there is not.
    """
    names = transformers(manifest)
    if policy.first_expert not in (None, *names):
        raise UsageError(
            "first_expert is not a transformer of this artifact",
            expected=" or ".join(names),
            found=repr(policy.first_expert),
        )
    return policy.first_expert or names[0]


class Session:
    """Makes videos of one profile. It holds no weights, and making one reads none.

    Args:
        shared: what it shares with the sessions of other profiles.
        profile: the profile.

    Attributes:
        profile: as given.
        programs: its programs, with their weights.
        loop: the form of the denoising loop where a generation names none: as the artifact was loaded, if the
            profile is built with it.
        text: what turns its prompts into embeddings.
        conditioning: what encodes its images and videos.
        sampler: makes its frames.
        placement: where two experts are kept; None for a model with one transformer.

    Raises:
        ArtifactError: if the profile cannot run here: see ``check_profile`` and ``Programs``.
        UsageError: likewise, or if the text encoder cannot run.
    """

    def __init__(self, shared: Shared, profile: Profile) -> None:
        opened = shared.opened
        manifest, policy = opened.manifest, opened.policy
        check_profile(opened.folder, profile, opened.selected, policy)
        loop = policy.loop if policy.loop in loop_forms(profile) else None
        self.profile, self.loop = profile, resolve_loop(profile, loop)
        self._opened, self._experts = opened, transformers(manifest)
        self._first_expert = first_expert(manifest, policy)
        self.placement = _place(opened, profile)
        kind = "both" if self.placement is None else self.placement.kind
        shared.weights.keep_on_host(self._experts if kind == "host" else ())
        self.programs = Programs(profile, shared.executables, shared.weights)
        self.text = shared.texts.of(self.programs, profile.options.dtype)
        self._order = manifest.model.task.order
        self._expert_loop = ExpertLoop(self.programs, profile, self._experts, kind, self._order.expert)
        self.conditioning = Conditioning(
            self.programs, manifest, profile, shared.last_encoded, policy.low_memory
        )
        self.sampler = Sampler(self.programs, manifest, profile, self.conditioning, self._expert_loop)
        self._text_expected = True

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the latents."""
        return latents_shape(self._opened.manifest, self.profile)

    def describe(self, timings: Timings) -> None:
        """Says where the experts are kept, to the timings of what runs in this session."""
        if self.placement is not None:
            timings.placement = self.placement.kind

    def start(self, prompts: Sequence[str] | None, inputs: Inputs | None, timings: Timings) -> None:
        """Loads until the first step could run; what comes after it is loaded behind the second step.

        Args:
            prompts: as of ``load``.
            inputs: as of ``load``.
            timings: where the time is recorded.

        Raises:
            ArtifactError: if something that is needed is missing or damaged.
        """
        text, waiting = self.text, list[Future[Any]]()
        missing = self._start_text(prompts, waiting, timings)
        conditioned = inputs is not None or self.conditioning.needed
        if conditioned:
            waiting += self.conditioning.request_weights()
        waiting += self.programs.request(components=[self._first_expert])
        if missing:
            waiting += text.backend.request(text.tokenizer(missing).lengths)
        if conditioned:  # after the text's, which is encoded first
            waiting += self.conditioning.request_programs()
        waiting += self.programs.request(programs=[*self._order.expert, LOOP_PROGRAMS[self.loop]])
        when_done(waiting, timings.mark_ready)
        if missing:
            with timings.phase("text"):
                text.prompts.fetch(missing)
                waiting = unfinished(waiting)  # or they hold the text encoder
                text.spare()
        if inputs is not None:
            self.conditioning(inputs, timings=timings)
            waiting = unfinished(waiting)
        for future in waiting:
            future.result()

    def _start_text(
        self, prompts: Sequence[str] | None, waiting: list[Future[Any]], timings: Timings
    ) -> list[str]:
        """Starts to load what encodes prompts, and returns those that are to be encoded meanwhile."""
        text, low = self.text, self._opened.policy.low_memory
        if prompts is None:
            text.tokenizer.load()
            if not low:
                waiting += text.backend.request()
            return []
        missing = [clean_prompt(prompt) for prompt in text.prompts.missing(prompts)]
        if not missing:
            self._text_expected = False
            return []
        text.tokenizer.start(missing)
        waiting += text.backend.request(())
        if low:  # not both in memory
            waiting.clear()
            text.encode(missing, timings)
            return []
        return missing

    def load_behind(self) -> None:
        """Asks for what comes after the last step, and raises what has failed of it."""
        programs = self._order.after
        components = [name for program in programs for name in self.programs.components(program)]
        unfinished(self.programs.request(programs=programs, components=components))

    def velocity(
        self, latents: np.ndarray, embeddings: np.ndarray, timestep: float, steps: ExpertRange, inputs: Any
    ) -> np.ndarray:
        """The model's guided output at these latents; see ``Pipeline.velocity``."""
        run = Denoising(velocity_table(timestep), [steps], embeddings, self.loop, Timings())
        return latents - self._expert_loop(run, latents, self.conditioning(inputs, timings=Timings()))

    def warm_up_text(self) -> None:
        """Runs the text encoder once, unless ``start`` was told the prompts and had all their embeddings."""
        if self._text_expected:
            self.text.warm_up()

    def warm_up(self, timings: Timings) -> None:
        """Executes every program once but the text encoder's, and with every expert; no step is recorded."""
        embeddings = self.text.blank(2 if self.profile.guidance else 1)
        noise, table = initial_noise(0, self.latents_shape), velocity_table(500.0)
        conditions = self.conditioning.blank()
        # Each expert, not those that some boundary and shift choose; the one that is next to run is last.
        for expert in sorted(self._experts, key=lambda name: name == self._first_expert):
            run = Denoising(table, [ExpertRange(expert, 0, 1, 1.0)], embeddings, self.loop, Timings())
            latents = self._expert_loop(run, noise, conditions)
        self.sampler.decode(latents[:1], timings)


def _place(opened: OpenedArtifact, profile: Profile) -> Placement | None:
    """Where two experts are kept while a profile runs; a single transformer stays on the device."""
    if len(transformers(opened.manifest)) == 1:
        return None
    return choose_placement(
        opened.manifest,
        opened.programs(profile),
        opened.selected.target.statistics.get(profile.name, {}),
        Machine.of(opened.device.device),
        opened.policy,
    )
