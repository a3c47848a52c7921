"""Opens an artifact for a profile: chooses the target, checks it, and opens the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import FORMS
from wanrun.artifact.select import SelectedTarget, select_target
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.agreement import together
from wanrun.generation.session import first_expert
from wanrun.machine.environment import device_environment
from wanrun.media.types import Inputs
from wanrun.opened.artifact import OpenedArtifact
from wanrun.opened.cancel import CancelToken
from wanrun.opened.device import open_device
from wanrun.opened.policy import SHAPE, LoadPolicy
from wanrun.request.options import resolve_loop
from wanrun.request.profiles import choose_profile
from wanrun.text.beside import cpu_target, opened_beside, wants_cpu
from wanrun.text.encoder import silent
from wanrun.text.stage import TextStages
from wanrun.timing.timings import Recorder, Timings
from wanrun.trust.trust import Trust
from wanrun.weights.buffers import Memory
from wanrun.weights.store import WeightStore

if TYPE_CHECKING:
    from wanrun.cluster.process_group import ProcessGroup

Tell = Callable[[str], None]


class LoadKeywords(LoadPolicy, frozen=True, kw_only=True):
    """The keywords of ``load``: the options of loading, and what only Python can give.

    Attributes:
        prompts: the prompts of the next generations, with the negative ones. They are encoded meanwhile, and
            the text encoder is not read if all their embeddings are stored. None means any prompt.
        inputs: the images and videos of the first generation, which are encoded meanwhile.
        later: names of profiles of later generations. Executables of theirs that were built elsewhere are
            tried now too: once the device is open, no other process can have it.
        timings: where the times are recorded; None for new ones.
        warn: gets messages about problems that do not stop the run.
        report: gets messages about decisions: where two experts are kept.
        group: the processes that share the target's mesh; None for this one alone. All of them make the
            same calls in the same order; the user's cache of embeddings, which may differ, is not read.
        cancel: ends ``load`` when another thread asks for it.
        progress: whether standard error says what loading and each generation wait for; None: in a notebook.
    """

    prompts: Sequence[str] | None = None
    inputs: Inputs | None = None
    later: Sequence[str] = ()
    timings: Timings | None = None
    warn: Tell = silent
    report: Tell = silent
    group: ProcessGroup | None = None
    cancel: CancelToken | None = None
    progress: bool | None = None


@dataclass(frozen=True)
class Opening:
    """What is opened, and how.

    Args:
        policy: the options of loading, which choose the profile and the target too.
        given: the other keywords of ``load``.
    """

    folder: Path
    policy: LoadPolicy
    timings: Timings
    given: LoadKeywords

    def open(self, undo: ExitStack) -> tuple[WeightStore, TextStages, Profile]:
        """Opens the artifact; ``undo`` closes what is opened.

        Returns its weights and executables, its text stages, of which nothing is loaded yet, and the wanted
        profile. The caller closes the first two.

        Raises:
            ArtifactError, CancelledError, UsageError, ClusterError: as ``wanrun.load``.
        """
        folder, timings, given = self.folder, self.timings, self.given
        with timings.phase("manifest"):
            manifest = read_manifest(folder)
            profile = wanted_profile(manifest, folder, self.policy)
            selected = self._selected(manifest, profile)
        streams = FORMS[resolve_loop(profile, self.policy.form)].streams
        policy = together(
            given.group, manifest, selected.name, profile, self.policy, given.prompts, given.inputs
        )
        trust = self._trust(manifest, selected)
        for other in dict.fromkeys(given.later):
            if other != profile.name:
                self._try_ahead(manifest, choose_profile(manifest, folder, {"profile": other}))
        if refusal := self._refusal(trust, profile):
            selected = replace(selected, refusal=refusal)
        cancel, ahead, expert = (
            given.cancel or CancelToken(),
            dict[str, Memory](),
            first_expert(manifest, policy),
        )
        cancel.check()
        # The text encoder may come first; of a mesh it is not known yet which rows this process reads.
        if not (policy.lazy or policy.low_memory or selected.mesh or streams):
            ahead[expert] = Memory(manifest.components[expert])
            ahead[expert].touch_ahead()  # while jax is imported
            undo.callback(ahead[expert].stop)
        text, cpu = None, None
        if wants_cpu(policy.text_encoder_device, selected):
            text, cpu = cpu_target(manifest, folder, profile), "cpu"
        device = open_device(selected, policy.allow_compile, timings, given.warn, given.group, cpu)
        cancel.check()
        if not device.foreign:
            trust.check_device(profile, device_environment(device.devices))
        opened = OpenedArtifact(
            folder, manifest, selected, device, policy, Recorder(), given.warn, given.report, trust.check
        )
        beside = None if text is None else opened_beside(opened, text)
        texts = TextStages(opened, None if beside is None else WeightStore(beside))
        return WeightStore(opened, ahead), texts, profile

    def _try_ahead(self, manifest: Manifest, profile: Profile) -> None:
        """Tries the executables of a profile that is loaded later, if they were built elsewhere."""
        try:
            selected = self._target(manifest, profile)
        except ArtifactError:
            return  # told in the profile's turn
        self._refusal(self._trust(manifest, selected), profile)

    def _trust(self, manifest: Manifest, selected: SelectedTarget) -> Trust:
        how = {"memory": "stream"} if self.policy.form == "stream" else {}
        if wants_cpu(self.policy.text_encoder_device, selected):
            how["text_encoder_device"] = "cpu"
        return Trust(self.folder, manifest, selected, self.policy.weights, self.policy.trial, how)

    def _selected(self, manifest: Manifest, profile: Profile) -> SelectedTarget:
        """Chooses the target; reports why others do not fit, and which level of CPUs it is."""
        selected = self._target(manifest, profile)
        if selected.others:
            self.given.report(f"target {selected.name}; others do not fit: {', '.join(selected.others)}")
        elif "cpu_level" in selected.target.environment:
            self.given.report(f"target {selected.name}")
        return selected

    def _target(self, manifest: Manifest, profile: Profile) -> SelectedTarget:
        return select_target(manifest, self.folder, profile, self.policy.target, self.policy.allow_compile)

    def _refusal(self, trust: Trust, profile: Profile) -> str:
        """Tries executables that were built elsewhere; returns why they are refused, or ""."""
        if not trust.needed or trust.selected.mismatches:
            return ""
        if self.given.group is not None:
            raise ArtifactError(
                f"target {trust.selected.name} was built without its chip, and several processes do not try "
                "executables",
                expected="a target that was compiled on these chips",
                remedy="run wanbuild compile --target local on them",
            )
        try:
            with self.timings.phase("trial"):
                trust.establish(profile, self.given.report)
        except ArtifactError as error:
            if not self.policy.allow_compile:
                raise
            return f"{error.what}; found {error.found}"
        return ""


def wanted_profile(manifest: Manifest, artifact: Path, policy: LoadPolicy) -> Profile:
    """Returns the profile that the options of loading choose.

    Raises:
        ArtifactError: if there is none.
        UsageError: for a name beside an option of the shape.
    """
    shape = {name: getattr(policy, name) for name in SHAPE}
    if policy.profile is None:
        return choose_profile(manifest, artifact, shape)
    if beside := [name for name, value in shape.items() if value != getattr(LoadPolicy(), name)]:
        raise UsageError(f"profile is given beside {beside[0]}", remedy="leave one of them out")
    return choose_profile(manifest, artifact, {"profile": policy.profile})
