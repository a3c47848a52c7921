"""Verdicts that an artifact brings: its executables were right on another machine of this one's kind.

Each is a file that the manifest lists by the digest of its facts, so a machine with other facts does not even
open it. It says no more than the executables beside it: who can change those can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.named import VERDICT
from wanrun.trust.verdict import Verdict, decoded_verdict, keep_verdict, read_verdict, verdict_key

Tell = Callable[[str], None]


def silent(line: str) -> None:
    """Reports nothing."""


def known_verdict(artifact: Artifact, facts: Mapping[str, Any], report: Tell = silent) -> Verdict | None:
    """Returns the user's own verdict about these facts, else the artifact's, which is reported; else None.

    Raises ArtifactError if the artifact's is missing or damaged.
    """
    kept = read_verdict(facts)
    if kept is not None or (found := _recorded(artifact, facts)) is None:
        return kept
    record = artifact.manifest.verdicts[verdict_key(facts)]
    report(
        f"the executables were right on {record.device_kind[:60]}, as the artifact has recorded "
        f"on {record.made[:10]}: target {record.target}, profile {record.profile}"
    )
    return found


def _recorded(artifact: Artifact, facts: Mapping[str, Any]) -> Verdict | None:
    """Returns the artifact's verdict about these facts; None if it has none that counts here."""
    record = artifact.manifest.verdicts.get(verdict_key(facts))
    if record is None or not names_machine(artifact, facts) or read_verdict(_aside(artifact, facts)):
        return None
    found = decoded_verdict(artifact.listed(VERDICT, record))
    return found if found is not None and found.passed and found.facts == facts else None


def names_machine(artifact: Artifact, facts: Mapping[str, Any]) -> bool:
    """Whether facts name what runs the executables, so that those of two machines can be compared.

    Some containers hide an accelerator's driver.
    """
    environment = artifact.manifest.targets[facts["target"]].environment
    return environment["platform"] == "cpu" or bool(facts["driver"])


def set_aside(artifact: Artifact, facts: Mapping[str, Any]) -> None:
    """Makes this user's runs ignore the artifact's verdict about these facts: the device is another.

    Raises UsageError if the user's cache cannot be written.
    """
    if verdict_key(facts) in artifact.manifest.verdicts:
        told = Verdict(outcome="refused", reason="the artifact's verdict is of another device")
        keep_verdict(_aside(artifact, facts), told)


def _aside(artifact: Artifact, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts under which it is kept that the artifact's verdict does not count."""
    return {**facts, "recorded": artifact.manifest.verdicts[verdict_key(facts)].sha256}
