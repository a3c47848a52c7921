"""A profile that is lacking: built by a child, once, outside the artifact. The child here is a stand-in."""

from __future__ import annotations

import importlib.util
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from helpers.opened import Opened
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.overlay import overlay_of
from wanrun.artifact.select import UnbuiltError, select_profile
from wanrun.errors import CancelledError, UsageError
from wanrun.opened.cancel import CancelToken
from wanrun.request.building import build_beside, built
from wanrun.timing.timings import Timings

Child = Callable[[list[str]], object]


def lacking(artifact: Artifact, width: int = 160) -> UnbuiltError:
    with pytest.raises(UnbuiltError) as raised:
        select_profile(artifact, (width, 96), 9)
    return raised.value


def build(artifact: Artifact, width: int = 160) -> Artifact:
    return built(artifact, lacking(artifact, width), None, Timings(), lambda line: None)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lets the child name the nearest profile's programs as those of the wanted one; returns its commands."""
    seen, start = list[list[str]](), subprocess.Popen

    def child(command: list[str], **how: Any) -> object:
        seen.append(command)
        said = dict(itertools.pairwise(command))
        artifact = open_artifact(said["compile"])
        old, manifest = said["--like"], artifact.manifest
        width, height = map(int, said["--size"].split("x"))
        new = structs.replace(manifest.profiles[old], width=width, height=height, index=7)

        def more(record: Any, *names: str) -> Any:
            fields = {name: getattr(record, name) for name in names}
            return structs.replace(record, **{k: {**v, new.name: v[old]} for k, v in fields.items()})

        sets = {key: more(one, "programs") for key, one in manifest.program_sets.items()}
        targets = {key: more(one, "executables", "statistics") for key, one in manifest.targets.items()}
        profiles = {**manifest.profiles, new.name: new}
        artifact.changed(profiles=profiles, program_sets=sets, targets=targets).write()
        return start([sys.executable, "-Sc", ""], **how)

    monkeypatch.setattr(subprocess, "Popen", child)
    return seen


def test_it_is_built_once_beside_the_artifact(artifact: Path, commands: list[list[str]]) -> None:
    own = open_artifact(artifact)
    before = (artifact / MANIFEST).read_bytes()
    error = lacking(own)
    found = built(own, error, None, Timings(), lambda line: None)
    assert (artifact / MANIFEST).read_bytes() == before
    assert found.manifest.digests == own.manifest.digests
    assert select_profile(found, (160, 96), 9).options == error.nearest.options
    assert found.built_here("160x96x9-b1-cfg") and not found.built_here(error.nearest.name)
    assert min(found.manifest.profiles.values(), key=lambda one: one.index) == error.nearest
    assert built(own, error, None, Timings(), lambda line: None) == found and len(commands) == 1
    more = build(found, width=192)  # beside the first one
    assert more.manifest.profiles.keys() - own.manifest.profiles.keys() == {
        "160x96x9-b1-cfg",
        "192x96x9-b1-cfg",
    }
    assert commands[1][commands[1].index("--target") + 1] == "cpu"


def test_an_open_artifact_grows(artifact: Path, commands: list[list[str]]) -> None:
    """Its target has the new executables; a chip's compiler would want the device that the process has."""
    held = Opened(artifact)
    opened, error = held.opened, lacking(held.opened.artifact)
    chip: Any = SimpleNamespace(platform="tpu")
    with pytest.raises(UsageError) as refused:
        build_beside(replace(opened, device=replace(opened.device, device=chip)), error)
    assert error.lacking.compile_options in str(refused.value.remedy) and not commands
    build_beside(opened, error)
    assert opened.artifact.built_here(error.lacking.name)
    for name in (error.lacking.name, error.nearest.name):
        assert opened.target.executables[name] and opened.programs(opened.manifest.profiles[name])
    held.close()


def test_what_cannot_be_built_is_one_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, start = open_artifact(artifact), subprocess.Popen
    failing = [sys.executable, "-Sc", "print('error: too large'); raise SystemExit(2)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start(failing, **how))
    with pytest.raises(UsageError) as failed:
        build(own)
    assert failed.value.found == "too large"
    assert not (overlay_of(own.manifest).path / "programs" / "160x96x9-b1-cfg").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as lacks:
        build(own)
    assert lacks.value.remedy is not None and "pip install" in lacks.value.remedy


def test_a_build_is_cancelled(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its child works, which ends; and while another process builds."""
    own, start, token = open_artifact(artifact), subprocess.Popen, CancelToken()
    children = list[Any]()

    def child(command: list[str], **how: Any) -> object:
        assert how.pop("env") == {"A": "b"}
        children.append(
            start([sys.executable, "-Sc", "print(flush=True); import time; time.sleep(60)"], **how)
        )
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", child)
    given: Any = own, lacking(own), None, Timings(), lambda line: token.cancel(), token, {"env": {"A": "b"}}
    with pytest.raises(CancelledError):
        built(*given)
    assert children[0].returncode == -signal.SIGTERM
    with overlay_of(own.manifest).held(), pytest.raises(CancelledError):
        built(*given)
    assert len(children) == 1
