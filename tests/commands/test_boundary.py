"""The runtime needs no model code, no build tools and no checkpoint library to make a video."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import USED
from helpers.terminal import complaints

# Imports of these fail, as they do where the packages are not installed.
FORBIDDEN = (
    "wanbuild",
    "flax",
    "torch",
    "transformers",
    "safetensors",
    "diffusers",
    "huggingface_hub",
    "accelerate",
    "orbax",
    "tensorstore",
    "optax",
)

# Runs wanrun with these imports failing (or not), and tells what was imported, traced and compiled.
OBSERVED = """
import importlib.abc, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

block, forbidden, report, *arguments = json.load(sys.stdin)
if block:
    sys.meta_path.insert(0, Blocker())
from jax import monitoring

events = {}
def listen(event, seconds, **details):
    events.setdefault(event.rpartition("/")[2], []).append(details.get("fun_name"))
monitoring.register_event_duration_secs_listener(listen)

from wancli.run import wanrun
from wancli.console import run
code = run(wanrun, arguments)
submodules = sorted(sys.modules)
modules = sorted({name.partition(".")[0] for name in submodules})
with open(report, "w") as file:
    json.dump({"modules": modules, "submodules": submodules, "events": events}, file)
sys.exit(code)
"""


def run_observed(
    block: bool, artifact: Path, folder: Path, *options: object
) -> subprocess.CompletedProcess[str]:
    """Asks for a video o.mp4 in a new folder, with what was observed in report.json."""
    folder.mkdir()
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", folder / "o.mp4"]
    arguments += ["--no-embedding-cache", *options]
    return subprocess.run(
        [sys.executable, "-c", OBSERVED],
        input=json.dumps([block, FORBIDDEN, str(folder / "report.json"), *map(str, arguments)]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def observe(block: bool, artifact: Path, folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Makes a video; returns its bytes and what was observed."""
    done = run_observed(block, artifact, folder)
    assert done.returncode == 0 and complaints(done.stderr) == [], done.stderr
    return (folder / "o.mp4").read_bytes(), json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def blocked(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    return observe(True, toy_artifact, tmp_path_factory.mktemp("blocked") / "run")


@pytest.mark.thorough
def test_the_same_video_without_them(
    blocked: tuple[bytes, dict[str, Any]], toy_artifact: Path, tmp_path: Path
) -> None:
    video, seen = observe(False, toy_artifact, tmp_path / "run")
    assert video == blocked[0]
    assert set(seen["modules"]) & set(FORBIDDEN) == set()  # they are there, and nobody asked for them
    assert "scipy.linalg" not in seen["submodules"]  # JAX would import it for LAPACK, in a fifth of a second


@pytest.mark.thorough
def test_only_the_programs_are_traced(blocked: tuple[bytes, dict[str, Any]]) -> None:
    """What JAX traces are the calls of the exported programs, once each; every compilation is one of them."""
    programs = list(USED)
    events = blocked[1]["events"]
    assert sorted(events["jaxpr_trace_duration"]) == programs
    assert sorted(events["backend_compile_duration"]) == [f"jit({name})" for name in programs]
    assert "cache_retrieval_time_sec" not in events  # JAX is handed the executables, and asks no cache


def test_the_blocker_blocks() -> None:
    """The test above would pass with a finder that does nothing."""
    code = OBSERVED.replace("from jax import monitoring", "import safetensors")
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([True, FORBIDDEN, "unused"]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "'safetensors'" in done.stderr
