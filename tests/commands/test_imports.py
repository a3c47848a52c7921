"""What commands import: no model code for a video, nothing heavy for help; and one line without an extra."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import USED
from helpers.refusals import check_json
from helpers.terminal import complaints
from wanbuild.build_command import BUILD_EXTRA
from wanbuild.cli import wanbuild

# Lets imports of the packages in ``forbidden`` fail, as they do where these are not installed.
BLOCKER = """
import contextlib, importlib.abc, io, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

forbidden, *given = json.load(sys.stdin)
sys.meta_path.insert(0, Blocker())
"""


def blocked(code: str, forbidden: Sequence[str], *given: object) -> subprocess.CompletedProcess[str]:
    """Runs code without these packages; it has the rest as ``given``."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code],
        input=json.dumps([forbidden, *given], default=str),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_blocker_blocks() -> None:
    """The tests below would pass with a finder that does nothing."""
    done = blocked("import safetensors", ["safetensors"])
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "'safetensors'" in done.stderr


# A video.

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


# Runs wanrun, and tells what was imported, traced and compiled.
OBSERVED = """
from jax import monitoring

events = {}
def listen(event, seconds, **details):
    events.setdefault(event.rpartition("/")[2], []).append(details.get("fun_name"))
monitoring.register_event_duration_secs_listener(listen)

from wancli.run import wanrun
from wancli.console import run
report, *arguments = given
code = run(wanrun, arguments)
submodules = sorted(sys.modules)
modules = sorted({name.partition(".")[0] for name in submodules})
with open(report, "w") as file:
    json.dump({"modules": modules, "submodules": submodules, "events": events}, file)
sys.exit(code)
"""


def observe(forbidden: Sequence[str], artifact: Path, folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Makes a video; returns its bytes and what was observed."""
    folder.mkdir()
    video, report = folder / "o.mp4", folder / "report.json"
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", "2", "--output", video]
    done = blocked(OBSERVED, forbidden, report, *arguments, "--no-embedding-cache")
    assert done.returncode == 0 and complaints(done.stderr) == [], done.stderr
    return video.read_bytes(), json.loads(report.read_text())


@pytest.fixture(scope="module")
def without_model_code(
    toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, dict[str, Any]]:
    return observe(FORBIDDEN, toy_artifact, tmp_path_factory.mktemp("blocked") / "run")


@pytest.mark.thorough
def test_the_same_video_without_them(
    without_model_code: tuple[bytes, dict[str, Any]], toy_artifact: Path, tmp_path: Path
) -> None:
    video, seen = observe((), toy_artifact, tmp_path / "run")
    assert video == without_model_code[0]
    assert set(seen["modules"]) & set(FORBIDDEN) == set()  # they are there, and nobody asked for them
    assert "scipy.linalg" not in seen["submodules"]  # JAX would import it for LAPACK, in a fifth of a second


@pytest.mark.thorough
def test_only_the_programs_are_traced(without_model_code: tuple[bytes, dict[str, Any]]) -> None:
    """What JAX traces are the calls of the exported programs, once each; every compilation is one of them."""
    programs = list(USED)
    events = without_model_code[1]["events"]
    assert sorted(events["jaxpr_trace_duration"]) == programs
    assert sorted(events["backend_compile_duration"]) == [f"jit({name})" for name in programs]
    assert "cache_retrieval_time_sec" not in events  # JAX is handed the executables, and asks no cache


# wanbuild without its extra.

COMMANDS = """
from wanbuild.cli import wanbuild
from wancli.console import run

results = []
for arguments in given:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(wanbuild, arguments)
    results.append([code, out.getvalue(), err.getvalue()])
json.dump([results, sorted({"jax", "numpy"} & sys.modules.keys())], sys.stdout)
"""

INSTALL = "pip install '.[build]'"
PACKAGES = sorted({name.partition(".")[0] for name in BUILD_EXTRA})


def without(packages: Sequence[str], *commands: Sequence[object]) -> tuple[list[Any], list[str]]:
    """The exit code, stdout and errors as JSON of each command, and which heavy packages were imported."""
    given = ([*map(str, arguments), "--json-errors"] for arguments in commands)
    done = blocked(COMMANDS, packages, *given)
    assert done.returncode == 0, done.stderr
    results, heavy = json.loads(done.stdout)
    return results, heavy


def test_commands_name_the_extra(toy_checkpoint: Path, toy_artifact: Path, tmp_path: Path) -> None:
    recipe, built = tmp_path / "recipe.toml", tmp_path / "built"
    recipe.write_text(f'source = "{toy_checkpoint}"\nartifact = "{built}"\n')
    calls: dict[str, list[object]] = {
        "convert": ["convert", toy_checkpoint, "--artifact", built],
        "compile": ["compile", "--artifact", toy_artifact, "--size", "96x64", "--frames", 5],
        "verify": ["verify", "--artifact", toy_artifact],
        "build": ["build", recipe],
        "toy": ["toy", tmp_path / "toy"],
    }
    results, heavy = without(PACKAGES, *calls.values())
    missing = ", ".join(f"no {name}" for name in BUILD_EXTRA)
    for name, (code, output, line) in zip(calls, results, strict=True):
        assert (code, output) == (2, "")
        check_json(line, "not_installed", message=f"wanbuild {name} ", found=missing, remedy=INSTALL)
    assert heavy == []  # and before anything slow
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILD_EXTRA)
def test_one_package_alone(toy_artifact: Path, name: str) -> None:
    """``verify`` too, though it restores with plain Orbax at its end only."""
    ((code, output, line),), _ = without([name.partition(".")[0]], ["verify", "--artifact", toy_artifact])
    assert (code, output) == (2, "")
    error = check_json(line, "not_installed", message="wanbuild verify ", remedy=INSTALL)
    assert error["found"] == f"no {name}"


@pytest.mark.slow
def test_help_and_inspect_need_no_extra(toy_artifact: Path) -> None:
    names = sorted(wanbuild.commands)
    asked = [["--help"], ["--version"], *([name, "--help"] for name in names)]
    results, _ = without(PACKAGES, *asked, ["inspect", "--artifact", toy_artifact])
    assert [(code, error) for code, _, error in results] == [(0, "")] * len(results)
    assert all(name in results[0][1] for name in names)
    assert "96x64x9-b1-cfg" in results[-1][1]


# What answers at once.


@pytest.mark.slow
def test_version_help_and_list(cli: Any, toy_artifact: Path) -> None:
    for program in ("wanrun", "wanbuild"):
        assert cli.succeeds(program, "--version").startswith(f"{program}, version ")
        text = cli.succeeds(program, "--help")
        assert text == cli.succeeds(program, "-h")
        assert text.startswith(f"Usage: {program} ")
    text = " ".join(cli.succeeds("wanrun", "--help").split())
    for option in (
        *("artifact", "prompt", "size", "seed", "timing-json", "last-image FILE", "reference-image FILE"),
        *("guidance-scale-2 X", "boundary X", "loop [step|scan|chunks|stream]"),
        *("image FILE", "video DIR|FILE", "mask DIR|FILE", "pose-video DIR|FILE", "face-video DIR|FILE"),
        *("background-video DIR|FILE", "mask-video DIR|FILE", "mode [animate|replace]"),
        *("conditioning-scale X", "segment-overlap 1|5"),
    ):
        assert f"--{option} " in text
    first, second = cli.succeeds("wanrun", "--artifact", toy_artifact, "--list").splitlines()
    assert first.startswith("wan2.1-t2v  sha256:")
    assert second == "96x64x9-b1-cfg  targets: cpu"


LOADED = """
import sys
before = len(sys.modules)
sys.argv = ["wanrun", *sys.argv[1:]]
import wanrun
{}
heavy = {{"jax", "flax", "numpy", "orbax", "tensorstore", "ml_dtypes", "PIL", "asyncio"}} & sys.modules.keys()
assert not heavy, heavy
print(len(sys.modules) - before, file=sys.stderr)
"""
RUN = "from {0} import {1}\nfrom wancli.console import run\nassert run({1}) == 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "arguments", "most"),
    [
        ("", "", 5),
        (RUN.format("wancli.run", "wanrun"), "--help", 260),
        (RUN.format("wancli.run", "wanrun"), "--artifact {} --list", 260),
        (RUN.format("wanbuild.cli", "wanbuild"), "--help", 225),
        (RUN.format("wanbuild.cli", "wanbuild"), "compile --help", 225),
    ],
    ids=["import", "help", "list", "help of wanbuild", "help of compile"],
)
def test_light_commands_load_nothing_heavy(code: str, arguments: str, most: int, toy_artifact: Path) -> None:
    """Nor many modules, of which each takes about half a millisecond."""
    command = [sys.executable, "-c", LOADED.format(code), *arguments.format(toy_artifact).split()]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(run.stderr.split()[-1]) <= most
