"""A trial whatever is known, and what of it an artifact can have for other machines of the kind."""

from __future__ import annotations

__all__ = ["Afresh"]

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Attested
from wanrun.artifact.named import VERDICT
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget
from wanrun.files import sha256_of
from wanrun.trust.recorded import names_machine
from wanrun.trust.trust import Trust
from wanrun.trust.verdict import drop_verdict, read_verdict, verdict_key


@dataclass(frozen=True)
class Afresh:
    """A trial of a profile's executables, which were built elsewhere for a target that fits this machine."""

    artifact: Artifact
    selected: SelectedTarget
    profile: Profile

    @cached_property
    def _trust(self) -> Trust:
        return Trust(self.artifact.changed(verdicts={}), self.selected)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return self._trust.facts(self.profile)

    @property
    def key(self) -> str:
        """The name of its verdict in the manifest."""
        return verdict_key(self._facts)

    @property
    def comparable(self) -> bool:
        """Whether another machine can compare its facts with those of this one."""
        return names_machine(self.artifact, self._facts)

    def run(self, report: Callable[[str], None]) -> None:
        """Tries the executables, and keeps the verdict.

        Raises:
            ArtifactError: if they are refused, or cannot be tried.
            UsageError: if the verdict cannot be kept.
        """
        drop_verdict(self._facts)
        self._trust.establish(self.profile, report)

    @property
    def refused(self) -> bool:
        """Whether a refusal is kept; none is of a trial that could not begin."""
        verdict = read_verdict(self._facts)
        return verdict is not None and not verdict.passed

    def recorded(self) -> tuple[Attested, bytes] | None:
        """Returns the record of the verdict that is kept, and its file's bytes; None unless it has passed."""
        verdict = read_verdict(self._facts)
        if verdict is None or not verdict.passed:
            return None
        data, name = verdict.encoded(), f"{self.selected.name}-{self.profile.name}"
        digest = sha256_of(data)
        record = Attested(
            file=f"{VERDICT.folder}/{name}-{digest[:12]}.json",
            sha256=digest,
            target=self.selected.name,
            profile=self.profile.name,
            device_kind=verdict.device_kind,
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        return record, data
