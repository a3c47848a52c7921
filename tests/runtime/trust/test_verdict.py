"""Verdicts are kept in the user's cache, one file for each set of facts; a damaged one counts as none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, put_executable
from helpers.manifests import with_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import select_target
from wanrun.trust.verdict import (
    Verdict,
    check_keepable,
    decoded_verdict,
    drop_verdict,
    keep_verdict,
    read_verdict,
    trial_facts,
    verdict_file,
)

FACTS = {"target": "v5e", "chip": ["0x0063"]}
PASSED = Verdict(outcome="passed", reason="agrees", device_kind="TPU v5e", platform_version="1")


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    assert read_verdict(FACTS) is None
    keep_verdict(FACTS, PASSED)
    assert read_verdict(FACTS) == msgspec.structs.replace(PASSED, facts=FACTS)
    assert read_verdict({**FACTS, "chip": ["0x006f"]}) is None
    assert [path.name for path in verdict_file(FACTS).parent.iterdir()] == [verdict_file(FACTS).name]
    drop_verdict(FACTS)
    drop_verdict(FACTS)
    assert read_verdict(FACTS) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 40_000, b'{"outcome": "perhaps", "reason": ""}', PASSED.encoded(), bytes(2**16 + 1)],
    ids=["empty", "no fields", "deep", "another outcome", "of other facts", "large"],
)
def test_a_broken_file_is_none(content: bytes) -> None:
    keep_verdict(FACTS, PASSED)
    verdict_file(FACTS).write_bytes(content)
    assert read_verdict(FACTS) is None
    keep_verdict(FACTS, PASSED)
    found = read_verdict(FACTS)
    assert found is not None and found.passed


def test_bytes_that_are_no_verdict() -> None:
    assert decoded_verdict(b"\xff") is None
    assert decoded_verdict(PASSED.encoded()) == PASSED


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refuses("unwritable", what="verdict", remedy="XDG_CACHE_HOME"):
        keep_verdict(FACTS, PASSED)
    with refuses("unwritable", remedy="XDG_CACHE_HOME"):
        check_keepable(FACTS)
    assert read_verdict(FACTS) is None


def test_a_cache_that_can_be_written_is_left_as_it_is() -> None:
    check_keepable(FACTS)
    assert not list(verdict_file(FACTS).parent.iterdir())


def facts_of(artifact: Path, root: Path = Path("/")) -> dict[str, Any]:
    manifest = read_manifest(artifact)
    profile = manifest.profiles[PROFILE]
    return trial_facts(manifest, select_target(Artifact(manifest, artifact), profile, TARGET), profile, root)


def test_facts_are_of_all_that_a_trial_depends_on(elsewhere: Path) -> None:
    """The content digest is equal for another build of the executables."""
    first = facts_of(elsewhere)
    assert (first["target"], first["profile"], first["driver"]) == (TARGET, PROFILE, "")
    assert first["chip"][0] == os.uname().machine
    put_executable(elsewhere, "prepare", b"another")
    second = facts_of(elsewhere)
    manifest = read_manifest(elsewhere)
    beside = msgspec.structs.replace(manifest.profiles[PROFILE], guidance=False, index=1)
    with_profiles(manifest, [manifest.profiles[PROFILE], beside]).write(elsewhere)  # changes none of them
    third = facts_of(elsewhere)
    assert first["content_digest"] == third["content_digest"] and second == third
    assert {name for name in first if first[name] != second[name]} == {"executables"}
