"""An artifact opened on a device: its policy and weights, and what runs where the device differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from helpers.damage import PROFILE, PROGRAMS
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import ArtifactError, Mismatch
from wanrun.machine.environment import device_environment, host_environment
from wanrun.opened import device as device_module
from wanrun.opened.device import OpenDevice, open_device
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.opened.policy import LoadPolicy, weights_folder
from wanrun.rows import Row, rows_of
from wanrun.timing.timings import Recorder, Timings

# --- artifact ---


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


def test_what_it_runs_with(opened: Callable[[bool], OpenedArtifact]) -> None:
    """On a device that does not fit it has no executables, and what is compiled depends on this machine."""
    artifact = opened(False)
    target = artifact.manifest.targets["cpu"]
    assert artifact.target is target and artifact.environment is target.environment
    programs = artifact.programs(artifact.manifest.profiles[PROFILE])
    assert sorted(programs) == sorted(PROGRAMS)
    assert artifact.program_set.platform == "cpu" and artifact.program_set.programs[PROFILE] == programs
    artifact = opened(True)
    assert artifact.target.executables == {} and artifact.selected.target.executables
    assert artifact.target.folder == artifact.selected.target.folder
    here = {**host_environment("cpu"), **device_environment([jax.devices("cpu")[0]])}
    assert artifact.environment == here


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


# --- device ---


CPU = Mismatch("the CPU", "a", "b", "use another machine")
KIND = Mismatch("the device kind", "v5e", "v6e", "build for it")
TARGET = cast(Any, SimpleNamespace(environment={"platform": "cpu"}))


@pytest.fixture
def open_target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens the device of a target; returns what came of it, the warnings and the phases."""

    def call(host: Sequence[Mismatch] = (), device: Sequence[Mismatch] = (), allow: bool = False) -> Any:
        monkeypatch.setattr(device_module, "device_mismatches", lambda *facts: list(device))
        warnings: list[str] = []
        timings = Timings()
        selected = SelectedTarget("local", TARGET, tuple(host))
        return open_device(selected, allow, timings, warnings.append), warnings, timings

    return call


@pytest.mark.parametrize("allow", [True, False])
def test_a_device_that_fits(open_target: Any, allow: bool) -> None:
    found, warnings, timings = open_target(allow=allow)
    assert (found.device, found.foreign, warnings) == (jax.devices("cpu")[0], False, [])
    phases = {(span.phase, span.label) for span in timings.labelled_spans}
    assert phases >= {("import", "jax"), ("device", None)}


def test_another_device_is_refused_with_every_fact(open_target: Any) -> None:
    message = r"target local was not built for this machine: the device kind: .*the CPU"
    with pytest.raises(ArtifactError, match=message):
        open_target(device=[KIND, CPU])


@pytest.mark.parametrize(("host", "device"), [([CPU], []), ([], [KIND]), ([CPU], [KIND])])
def test_what_differs_may_be_compiled_around(
    open_target: Any, host: list[Mismatch], device: list[Mismatch]
) -> None:
    found, (warning,), _ = open_target(host, device, allow=True)
    assert found.foreign
    assert warning.endswith(": " + "; ".join(map(str, [*host, *device]))) and "compiled here" in warning


# --- location ---


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for weights in (str(folder), f"{folder}/", "a folder", "~/a folder"):
        LoadPolicy(weights=weights).check()
        assert weights_folder(weights) == folder


@pytest.mark.parametrize("weights", ["", "missing", "a\0", "\ud800", "~nobody/x"])
def test_what_is_no_folder(weights: str) -> None:
    """``load`` begins with its options: a wrong folder costs nothing."""
    with refuses("missing_file", expected="a folder", remedy="--weights"):
        LoadPolicy(weights=weights).check()


def test_an_address_is_the_artifacts() -> None:
    with refuses("missing_file", what="'https://host/weights'", remedy="address") as caught:
        weights_folder("https://host/weights?key=hush")
    assert "hush" not in str(caught.value)


# --- policy ---


@pytest.mark.parametrize("row", [row for row in rows_of(LoadPolicy) if row.choices], ids=lambda row: row.name)
def test_choices(row: Row) -> None:
    assert getattr(LoadPolicy(), row.name) in (row.choices[0], None)
    for choice in row.choices:
        LoadPolicy(**{row.name: choice}).check()
    with refuses("invalid_value", what=row.name, expected=", ".join(row.choices)) as caught:
        LoadPolicy(**{row.name: "cuda:1"}).check()
    assert caught.value.fields == ((row.name,) if row.name == "text_encoder_device" else ())
    assert LoadPolicy(memory="low").low_memory and not LoadPolicy().low_memory
