"""wanrun with executables that were built without their chip: never a wrong video, and one line."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from helpers.damage import PROFILE, Refused
from helpers.elsewhere import (
    TARGET,
    build_elsewhere,
    entry_of,
    impostor,
    leave_to_the_chip,
    put_executable,
    with_breakpoints,
)
from helpers.fake_pipeline import Run, run_here
from helpers.manifests import with_profiles
from helpers.refusals import check_json, refuses
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError
from wanrun.files import user_cache
from wanrun.generation.load import load
from wanrun.trust import trial
from wanrun.trust.verdict import Verdict, keep_verdict, trial_facts

Make = Callable[..., Run]


@pytest.fixture
def make(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Make:
    """Makes a video of an artifact here, with errors as JSON."""

    def call(artifact: Path, *options: object) -> Run:
        given = ["--prompt", "a fox", "--steps", 2, "--overwrite", "--output", tmp_path / "o.npy"]
        return run_here(capsys, artifact, *given, "--json-errors", *options)

    return call


def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a run that starts a child."""
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", "raise SystemExit('started')"))


def dies(monkeypatch: pytest.MonkeyPatch, said: Verdict) -> None:
    """Takes the place of the child: it is ended by a signal when it has come so far."""
    code = f"import os, sys; open(sys.argv[-1], 'wb').write({said.encoded()!r}); os.abort()"
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))


LOADING = Verdict(
    outcome="refused", reason="while they were loaded", device_kind="cpu", platform_version="cpu"
)


LOADED = msgspec.structs.replace(LOADING, outcome="passed")


def keep(artifact: Path, verdict: Verdict) -> None:
    """Keeps a verdict about the artifact's profile."""
    manifest = read_manifest(artifact)
    profile = manifest.profiles[PROFILE]
    keep_verdict(
        trial_facts(manifest, select_target(Artifact(manifest, artifact), profile), profile), verdict
    )


def verdicts() -> list[Path]:
    return sorted((user_cache() / "verdicts").glob("*.json"))


@pytest.mark.thorough
def test_what_is_right_is_used_and_remembered(
    make: Make, toy_artifact: Path, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this user, and by the artifact for users of other machines of the kind."""
    assert make(toy_artifact).code == 0
    native = np.load(tmp_path / "o.npy")
    assert run(wanbuild, ["attest", str(elsewhere), "--record"]) == 0
    without_child(monkeypatch)
    second = make(elsewhere)
    assert (second.code, second.err) == (0, [])
    assert np.array_equal(np.load(tmp_path / "o.npy"), native)
    (kept,) = verdicts()
    kept.write_bytes(b"{")  # counts as none
    third = make(elsewhere)
    (line,) = third.err
    assert third.code == 0 and TARGET in line and PROFILE in line
    assert run(wanbuild, ["attest", str(elsewhere)]) == 3  # whatever is known


@pytest.mark.thorough
def test_what_is_wrong_or_was_left_to_the_chip_is_compiled_here(
    make: Make, toy_artifact: Path, elsewhere: Path, tmp_path: Path
) -> None:
    """Once, by the first run, which says it in one line. Without what it has kept, a run compiles it."""
    assert make(toy_artifact).code == 0
    native = np.load(tmp_path / "o.npy")
    put_executable(elsewhere, "prepare", impostor(elsewhere, "prepare"))
    leave_to_the_chip(elsewhere, "denoise_step")
    first = make(elsewhere)
    assert (first.code, len(first.err)) == (0, 2) and TARGET in first.err[0] and PROFILE in first.err[0]
    assert "prepare differs by" in first.err[1] and "denoise_step" not in first.err[1]
    second = make(elsewhere)
    assert (second.code, second.err) == (0, [])
    assert np.allclose(np.load(tmp_path / "o.npy"), native, atol=1)
    shutil.rmtree(user_cache() / "executables")
    third = make(elsewhere)
    assert third.code == 0 and len(third.err) == 2
    reasons = {line.split()[2]: line.rpartition(": ")[2].split()[0] for line in third.err}
    assert reasons == {"prepare": "the", "denoise_step": "XLA"}


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the breakpoints are of x86")
def test_one_that_ends_its_process(
    make: Make, elsewhere: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_executable(elsewhere, "prepare", with_breakpoints(entry_of(elsewhere, "prepare")))
    done = make(elsewhere)
    assert done.code == 3
    (kept,) = verdicts()
    found, remedy = ("SIGTRAP", "prepare"), ("--allow-compile", kept)
    check_json(done.err[1], "wrong_machine", message=TARGET, found=found, remedy=remedy)
    without_child(monkeypatch)  # a refusal is kept
    assert refused(elsewhere, "--json-errors") == done.err[1]


def test_one_that_ends_its_loader(make: Make, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies(monkeypatch, LOADING)
    done = make(elsewhere)
    assert done.code == 3 and len(done.err) == 2
    check_json(done.err[1], "wrong_machine", found=("SIGABRT", LOADING.reason), remedy="--allow-compile")


@pytest.mark.slow
def test_what_is_refused_may_be_compiled(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the StableHLO, with the seconds; the next process finds it in the user's cache."""
    dies(monkeypatch, LOADING)
    for misses in (1, 0):
        warnings: list[str] = []
        with load(elsewhere, lazy=True, allow_compile=True, warn=warnings.append) as pipeline:
            (loading,) = pipeline._session.programs.request(programs=["prepare"])
            loading.result()
        assert TARGET in warnings[0] and "SIGABRT" in warnings[0]
        assert [line.startswith("compiled prepare in ") for line in warnings[1:]] == [True] * misses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"device_kind": "TPU v9", "device_kinds": ["TPU v9"]}, ("expected TPU v9", "found cpu")),
        ({"variables": {"XLA_FLAGS": "--xla_x=1"}}, ("XLA_FLAGS", "'--xla_x=1'", "found ''")),
    ],
)
def test_another_chip(make: Make, artifact: Path, facts: dict[str, Any], named: tuple[str, ...]) -> None:
    build_elsewhere(artifact, **facts)
    done = make(artifact)
    check_json(done.err[-1], "wrong_machine", message=(TARGET, *named))
    assert done.code == 3 and verdicts() == []


def test_too_few_devices(make: Make, elsewhere: Path) -> None:
    assert len(jax.devices("cpu")) == 1  # now open: a target of two opens two where it is the first
    manifest = read_manifest(elsewhere)
    target = manifest.targets[TARGET]
    old = manifest.program_sets[target.program_set]
    wide = msgspec.structs.replace(old, mesh={"data": 2})
    target = msgspec.structs.replace(target, program_set=wide.key)
    manifest.changed(program_sets={wide.key: wide}, targets={TARGET: target}).write(elsewhere)
    keep(elsewhere, LOADED)  # a child would have as many devices as it needs
    done = make(elsewhere)
    check_json(done.err[0], "wrong_machine", message=(TARGET, "at least 2", "found 1"))
    assert done.code == 3


def test_another_device_than_that_of_the_trial(make: Make, elsewhere: Path) -> None:
    keep(elsewhere, msgspec.structs.replace(LOADED, platform_version="old"))
    done = make(elsewhere)
    assert done.code == 3 and verdicts() == []
    (line,) = done.err
    check_json(line, "wrong_machine", message="platform version", expected="old", found="cpu")


@pytest.mark.slow
def test_beside_a_native_target_this_one_is_not_chosen(
    make: Make, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fit; and one of another chip is told with its reason."""
    build_elsewhere(artifact, beside=True, variables={"XLA_FLAGS": "--xla_x=1"})
    without_child(monkeypatch)
    done = make(artifact)
    (line,) = done.err
    assert done.code == 0 and line.startswith("target cpu; ")
    assert all(name in line for name in (TARGET, "XLA_FLAGS", "'--xla_x=1'", "found ''"))


def test_a_second_profile_that_was_not_checked_is_refused(elsewhere: Path) -> None:
    """This process has the device: another one cannot try the executables now."""
    manifest = read_manifest(elsewhere)
    first = manifest.profiles[PROFILE]
    second = msgspec.structs.replace(first, guidance=False, index=1)
    with_profiles(manifest, [first, second]).write(elsewhere)
    keep(elsewhere, LOADED)
    unchecked = refuses("wrong_machine", ArtifactError, what=f"profile {second.name} ")
    with load(elsewhere, guidance=True, lazy=True) as pipeline, unchecked:
        pipeline._weights.executables.check(second)
    assert len(verdicts()) == 1
