"""What is opened for a profile, and what of it is tried before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.manifests import with_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.programs import Profile
from wanrun.cluster.process_group import ProcessGroup
from wanrun.errors import ArtifactError
from wanrun.generation.choice import Choice
from wanrun.generation.load import LoadKeywords, on_device
from wanrun.opened.policy import LoadPolicy
from wanrun.timing.timings import Timings
from wanrun.trust import trial
from wanrun.trust.verdict import Verdict
from wanrun.weights.store import WeightStore

PASSED = Verdict(outcome="passed", reason="", device_kind="cpu", platform_version="cpu")


def opened(
    artifact: Path, lines: list[str], group: object = None, later: Sequence[str] = (), **policy: Any
) -> tuple[WeightStore, Profile]:
    group = cast(ProcessGroup, group)
    given = LoadKeywords(warn=lines.append, report=lines.append, group=group, later=later)
    choice = Choice(open_artifact(artifact), LoadPolicy(**policy))
    with contextlib.ExitStack() as undo:
        return on_device(choice, given, Timings(), undo)[0], choice.profile


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the place of the child: it finds everything right."""
    code = f"import sys; open(sys.argv[-1], 'wb').write({PASSED.encoded()!r})"
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))


def test_a_profile_is_wanted_by_its_name(toy_artifact: Path) -> None:
    artifact = open_artifact(toy_artifact)
    assert Choice(artifact, LoadPolicy(profile=PROFILE)).profile.name == PROFILE
    with refuses("unknown_name", ArtifactError, what="'x'", expected=PROFILE):
        _ = Choice(artifact, LoadPolicy(profile="x")).profile
    with refuses("conflict", what="num_videos"):
        _ = Choice(artifact, LoadPolicy(profile=PROFILE, num_videos=2)).profile


def test_without_guidance_in_any_profile_there_is_none(toy_artifact: Path) -> None:
    artifact = open_artifact(toy_artifact)
    (profile,) = artifact.manifest.profiles.values()
    without = with_profiles(artifact.manifest, [msgspec.structs.replace(profile, guidance=False)])
    plain = Artifact(without, toy_artifact)
    assert not Choice(plain, LoadPolicy()).profile.guidance
    assert Choice(artifact, LoadPolicy()).profile.guidance
    with refuses("not_built", ArtifactError, expected="-nocfg", remedy=" --guidance"):
        _ = Choice(plain, LoadPolicy(guidance=True)).profile


@pytest.mark.usefixtures("passing")
def test_what_is_needed_later_is_tried_ahead(elsewhere: Path) -> None:
    manifest = read_manifest(elsewhere)
    first = manifest.profiles[PROFILE]
    second = msgspec.structs.replace(first, guidance=False, index=1)
    with_profiles(manifest, [first, second]).write(elsewhere)
    lines: list[str] = []
    later = [first.name, second.name, second.name]
    opened(elsewhere, lines, later=later, lazy=True)
    assert len(lines) == 4 and all("target v9" in line for line in lines[::2])
    del lines[:]
    weights, profile = opened(elsewhere, lines, lazy=True)
    weights.opened.check_trust(second)
    assert profile == first and weights.opened.environment["platform_version"] == "cpu" and lines == []


class ProcessGroup2:
    """Two processes that agree on everything."""

    def agree_on_artifact(self, facts: object) -> None:
        pass

    agree_on_request = agree_on_artifact


def test_several_processes_try_nothing(elsewhere: Path) -> None:
    with refuses("wrong_machine", ArtifactError, what="target v9", remedy="--target local"):
        opened(elsewhere, [], ProcessGroup2())


def test_the_wanted_profile(elsewhere: Path) -> None:
    artifact = open_artifact(elsewhere)
    assert Choice(artifact, LoadPolicy()).profile.name == PROFILE
    with refuses("not_built", ArtifactError, what="32x32"):
        _ = Choice(artifact, LoadPolicy(size=(32, 32))).profile
