"""Verdicts of other machines in an artifact count where the facts are the same, and nobody knows better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import flip
from helpers.elsewhere import TARGET, put_executable, record_verdict
from helpers.manifests import full_manifest
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.errors import ArtifactError
from wanrun.trust.recorded import known_verdict, names_machine, set_aside
from wanrun.trust.verdict import Verdict, keep_verdict

PASSED = Verdict(outcome="passed", reason="they agree", device_kind="CPU v9", platform_version="1")
REFUSED = msgspec.structs.replace(PASSED, outcome="refused")


def test_the_user_s_own_comes_first(elsewhere: Path) -> None:
    lines: list[str] = []
    facts = record_verdict(elsewhere, PASSED)
    artifact = open_artifact(elsewhere)
    assert known_verdict(artifact, facts, lines.append) == msgspec.structs.replace(PASSED, facts=facts)
    assert len(lines) == 1 and "CPU v9" in lines[0] and "2026-11-29" in lines[0] and TARGET in lines[0]
    keep_verdict(facts, REFUSED)
    found = known_verdict(artifact, facts, lines.append)
    assert found is not None and not found.passed and len(lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "data", "other"),
    [
        (PASSED, b"", {"driver": "580.2"}),
        (PASSED, b"", {"packages": {"jax": "0.1"}}),
        (PASSED, b"", {"memory": "stream"}),
        (REFUSED, b"", {}),
        (PASSED, b"{", {}),
        (PASSED, PASSED.encoded(), {}),
    ],
    ids=["driver", "packages", "way of loading", "refusal", "no verdict", "about nothing"],
)
def test_another_one_does_not_count(
    elsewhere: Path, verdict: Verdict, data: bytes, other: dict[str, Any]
) -> None:
    lines: list[str] = []
    facts = record_verdict(elsewhere, verdict, data, **other)
    here = {name: "" if name in other else value for name, value in facts.items()}
    assert known_verdict(open_artifact(elsewhere), here, lines.append) is None and lines == []


def test_other_executables_leave_it_behind(elsewhere: Path) -> None:
    record_verdict(elsewhere, PASSED)
    put_executable(elsewhere, "prepare", b"another")
    assert open_artifact(elsewhere).manifest.verdicts == {}


def test_a_damaged_one_is_told(elsewhere: Path) -> None:
    facts = record_verdict(elsewhere, PASSED)
    (path,) = (elsewhere / "verdicts").iterdir()
    for damage in (lambda: flip(path, 0), path.unlink):
        damage()
        with pytest.raises(ArtifactError, match="recorded verdict"):
            known_verdict(open_artifact(elsewhere), facts)


def test_set_aside_it_counts_no_more(elsewhere: Path) -> None:
    facts = record_verdict(elsewhere, PASSED)
    artifact = open_artifact(elsewhere)
    set_aside(artifact, facts)
    set_aside(artifact, {**facts, "driver": "580.2"})  # there is none
    assert known_verdict(artifact, facts) is None
    record_verdict(elsewhere, msgspec.structs.replace(PASSED, platform_version="2"))  # another one
    assert known_verdict(open_artifact(elsewhere), facts) is not None


@pytest.mark.parametrize(("platform", "driver", "names"), [("cpu", "", True), ("cuda", "", False)])
def test_a_driver_that_is_not_shown_cannot_be_compared(platform: str, driver: str, names: bool) -> None:
    manifest = full_manifest()
    (programs,) = manifest.program_sets.values()
    programs = msgspec.structs.replace(programs, platform=platform)
    target = manifest.targets["cpu"]
    environment = {**target.environment, "platform": platform}
    target = msgspec.structs.replace(target, environment=environment, program_set=programs.key)
    changed = manifest.changed(program_sets={programs.key: programs}, targets={"cpu": target})
    artifact = Artifact(changed, Path())
    assert names_machine(artifact, {"target": "cpu", "driver": driver}) == names
    assert names_machine(artifact, {"target": "cpu", "driver": "580.1"})
