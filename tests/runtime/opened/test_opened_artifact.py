"""An artifact opened on a device: what its programs run with, on their own machine and on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from helpers.damage import PROFILE, PROGRAMS
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import SelectedTarget
from wanrun.machine.environment import device_environment, host_environment
from wanrun.opened.device import OpenDevice
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.opened.policy import LoadPolicy
from wanrun.timing.timings import Recorder


@pytest.fixture
def opened(toy_artifact: Path) -> Callable[[bool], OpenedArtifact]:
    """Opens the toy on a device that its executables fit, or not."""

    def make(foreign: bool) -> OpenedArtifact:
        manifest = read_manifest(toy_artifact)
        selected = SelectedTarget("cpu", manifest.targets["cpu"], ())
        device = OpenDevice(jax.devices("cpu")[0], foreign, cast(Any, None))
        return OpenedArtifact(
            Artifact(manifest, toy_artifact), selected, device, LoadPolicy(), Recorder(), print, print
        )

    return make


def test_on_a_device_that_fits(opened: Callable[[bool], OpenedArtifact]) -> None:
    artifact = opened(False)
    target = artifact.manifest.targets["cpu"]
    assert artifact.target is target and artifact.environment is target.environment


def test_on_a_device_that_does_not_fit(opened: Callable[[bool], OpenedArtifact]) -> None:
    """It has no executables, and what is compiled depends on this machine."""
    artifact = opened(True)
    assert artifact.target.executables == {} and artifact.selected.target.executables
    assert artifact.target.folder == artifact.selected.target.folder
    here = {**host_environment("cpu"), **device_environment([jax.devices("cpu")[0]])}
    assert artifact.environment == here


def test_the_target_s_programs(opened: Callable[[bool], OpenedArtifact]) -> None:
    artifact = opened(False)
    programs = artifact.programs(artifact.manifest.profiles[PROFILE])
    assert sorted(programs) == sorted(PROGRAMS)
    assert artifact.program_set.platform == "cpu"
    assert artifact.program_set.programs[PROFILE] == programs


@pytest.mark.parametrize(
    ("transfer", "platform", "processes", "expected"),
    [
        ("auto", "cpu", 1, False),
        ("auto", "cpu", 2, True),
        ("auto", "gpu", 1, True),
        ("staged", "cpu", 1, True),
        ("direct", "gpu", 2, False),
    ],
)
def test_when_rows_are_spread(
    opened: Callable[[bool], OpenedArtifact],
    monkeypatch: pytest.MonkeyPatch,
    transfer: str,
    platform: str,
    processes: int,
    expected: bool,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    device: Any = SimpleNamespace(mesh=object(), device=SimpleNamespace(platform=platform))
    policy, artifact = LoadPolicy(transfer=transfer), opened(False)
    assert not dataclasses.replace(artifact, policy=policy).staged  # on one device
    assert dataclasses.replace(artifact, policy=policy, device=device).staged == expected
