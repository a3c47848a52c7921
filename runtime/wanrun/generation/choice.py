"""The choice of ``load``: a profile by ``request.profiles``, and a target whose executables run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import FORMS
from wanrun.artifact.select import SelectedTarget, select_target
from wanrun.errors import ArtifactError, UsageError
from wanrun.opened.policy import SHAPE, LoadPolicy
from wanrun.request.options import resolve_loop
from wanrun.request.profiles import choose_profile
from wanrun.text.placement import cpu_target, wants_cpu
from wanrun.timing.timings import Timings
from wanrun.trust.trust import Trust

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The profile and the targets that options of loading choose; only the manifest is read."""

    artifact: Artifact
    policy: LoadPolicy

    @cached_property
    def profile(self) -> Profile:
        """The profile that is loaded first.

        Raises ArtifactError if there is none, and UsageError for a name together with an option of the shape.
        """
        policy, shape = self.policy, {name: getattr(self.policy, name) for name in SHAPE}
        if policy.profile is None:
            return choose_profile(self.artifact, shape)
        if beside := [name for name, value in shape.items() if value != getattr(LoadPolicy(), name)]:
            raise UsageError(
                "conflict", f"profile is given together with {beside[0]}", remedy="leave one of them out"
            )
        return choose_profile(self.artifact, {"profile": policy.profile})

    @property
    def streams(self) -> bool:
        """Whether the transformer's layers pass through the device one by one.

        Raises ArtifactError if the profile has no programs for the form of the loop.
        """
        return FORMS[resolve_loop(self.artifact, self.profile, self.policy.form)].streams

    def target(self, profile: Profile) -> SelectedTarget:
        """Returns the target of a profile. Raises ArtifactError as ``select_target``."""
        return select_target(self.artifact, profile, self.policy.target, self.policy.allow_compile)

    def text_target(self, selected: SelectedTarget, profile: Profile) -> SelectedTarget | None:
        """Returns the CPU target of the text encoder; None where it runs like all other programs.

        Raises ArtifactError as ``cpu_target``.
        """
        if wants_cpu(self.policy.text_encoder_device, selected):
            return cpu_target(self.artifact, profile)
        return None

    def trust(self, selected: SelectedTarget) -> Trust:
        """Returns the ``Trust`` of a target's executables."""
        how = {"memory": "stream"} if self.policy.form == "stream" else {}
        if wants_cpu(self.policy.text_encoder_device, selected):
            how["text_encoder_device"] = "cpu"
        return Trust(self.artifact, selected, self.policy.weights, self.policy.trial, how)

    def tried(self, selected: SelectedTarget, profile: Profile, timings: Timings, report: Tell) -> str:
        """Tries executables that were built elsewhere; returns why they are refused, or "".

        Raises ArtifactError if they are, and programs may not be compiled here.
        """
        trust = self.trust(selected)
        if not trust.needed or selected.mismatches:
            return ""
        try:
            with timings.phase("trial"):
                trust.establish(profile, report)
        except ArtifactError as error:
            if not self.policy.allow_compile:
                raise
            return f"{error.what}; found {error.found}"
        return ""

    def try_ahead(self, profile: Profile, timings: Timings, report: Tell) -> None:
        """Tries the executables of a profile that is loaded later, if they were built elsewhere."""
        try:
            selected = self.target(profile)
        except ArtifactError:
            return  # reported in the profile's turn
        self.tried(selected, profile, timings, report)
