"""Decides whether a target's executables may be used on the chip of this machine.

A native target was compiled on its chip. The executables of a target that was built elsewhere are tried
before this process opens the device, once for each chip, driver and profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import ArtifactError
from wanrun.errors import field as option
from wanrun.machine.attached import ROOT
from wanrun.trust.recorded import known_verdict, set_aside
from wanrun.trust.trial import run_trial
from wanrun.trust.verdict import (
    Verdict,
    check_keepable,
    drop_verdict,
    keep_verdict,
    trial_facts,
    verdict_file,
)

Try = Callable[[list[str]], Verdict]


@dataclass(frozen=True)
class Trust:
    """The decision whether a target's executables are trusted, profile by profile.

    ``weights`` is a folder of weights in place of the artifact's. ``how`` has the keywords of ``load`` that
    decide which executables are tried. ``trial`` says that this is the trial itself, which uses executables
    without a verdict. ``attempt`` tries executables, given the arguments of ``run_trial``.
    """

    artifact: Artifact
    selected: SelectedTarget
    weights: str | None = None
    trial: bool = False
    how: Mapping[str, str] = field(default_factory=dict)
    attempt: Try = field(default=run_trial)
    root: Path = ROOT

    @property
    def needed(self) -> bool:
        """Whether a trial is needed at all."""
        return self.selected.built_elsewhere and not self.trial

    def facts(self, profile: Profile) -> dict[str, Any]:
        """Returns the facts for which a verdict about a profile holds."""
        return {**trial_facts(self.artifact.manifest, self.selected, profile, self.root), **self.how}

    def establish(self, profile: Profile, report: Callable[[str], None]) -> None:
        """Tries a profile's executables, unless a verdict is known; reports the trial's beginning and end.

        JAX must not have opened the device yet. Raises ArtifactError if they are refused, or cannot be tried;
        UsageError if a verdict cannot be kept.
        """
        if not self.needed:
            return
        facts, name = self.facts(profile), self.selected.name
        verdict = known_verdict(self.artifact, facts, report)
        if verdict is None:
            check_keepable(facts)
            report(
                f"checking the executables on this chip: target {name}, profile {profile.name}, "
                f"in a process of their own, which compiles them here too{self._seconds(profile)}"
            )
            start = time.monotonic()
            verdict = self.attempt(self._arguments(profile))
            if verdict.passed:
                said = "are right" if not verdict.native else "were checked"
                report(f"the executables {said}: {verdict.reason} ({time.monotonic() - start:.0f} s)")
            if verdict.keep:
                keep_verdict(facts, verdict)
        if not verdict.passed:
            raise self._refusal(facts, verdict)

    def _arguments(self, profile: Profile) -> list[str]:
        given = {"artifact": str(self.artifact), "target": self.selected.name, "profile": profile.name}
        given |= {**({} if self.weights is None else {"weights": self.weights}), **self.how}
        return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]

    def _seconds(self, profile: Profile) -> str:
        """Says how long programs took to compile where they were built; nothing if that is not known."""
        known = self.selected.target.statistics.get(profile.name, {}).values()
        seconds = sum(float(one.get("compile_seconds", 0)) for one in known)
        return f" ({seconds:.0f} s where they were built)" if seconds >= 1 else ""

    def check(self, profile: Profile) -> Collection[str]:
        """Checks that a profile's executables are trusted, without trying them.

        Returns the names of the programs whose executables are not used. Raises ArtifactError if there is no
        verdict, or a refusal.
        """
        if not self.needed:
            return ()
        facts = self.facts(profile)
        verdict = known_verdict(self.artifact, facts)
        if verdict is None:
            raise self._error(
                f"of profile {profile.name} have not been checked on this chip",
                remedy="load this profile first in a process of its own",
            )
        if not verdict.passed:
            raise self._refusal(facts, verdict)
        return verdict.native

    def check_device(self, profile: Profile, found: Mapping[str, Any]) -> None:
        """Compares facts of ``device_environment`` with those of the trial.

        If they differ, it drops the verdict and raises ArtifactError.
        """
        if not self.needed:
            return
        facts = self.facts(profile)
        verdict = known_verdict(self.artifact, facts)
        if verdict is None:  # it was removed meanwhile
            return
        for name, tried in verdict.device.items():
            if tried != found[name]:
                drop_verdict(facts)
                set_aside(self.artifact, facts)
                raise self._error(
                    f"were checked on another {name.replace('_', ' ')}",
                    expected=tried,
                    found=found[name],
                    remedy="run it again: they are checked again then",
                )

    def _refusal(self, facts: Mapping[str, Any], verdict: Verdict) -> ArtifactError:
        again = "run it again"
        if verdict.keep:
            again = f"remove {verdict_file(facts)} to check them again"
        remedy = f"compile here with {option('allow_compile')}, or {again}"
        return self._error("cannot be used on this chip", found=verdict.reason, remedy=remedy)

    def _error(self, what: str, **parts: Any) -> ArtifactError:
        return ArtifactError(
            "wrong_machine", f"the executables of target {self.selected.name} {what}", **parts
        )
