"""``wanbuild`` where only the runtime is installed: one line that names the extra, and what works still."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import check_json
from wanbuild.build_command import BUILD_EXTRA
from wanbuild.cli import wanbuild

# Runs commands with the imports of some packages failing, as they do where the packages are not installed.
COMMANDS = """
import contextlib, importlib.abc, io, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

forbidden, commands = json.load(sys.stdin)
sys.meta_path.insert(0, Blocker())
from wanbuild.cli import wanbuild
from wancli.console import run

results = []
for arguments in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(wanbuild, arguments)
    results.append([code, out.getvalue(), err.getvalue()])
json.dump([results, sorted({"jax", "numpy"} & sys.modules.keys())], sys.stdout)
"""

INSTALL = "pip install '.[build]'"
PACKAGES = sorted({name.partition(".")[0] for name in BUILD_EXTRA})


def without(packages: Sequence[str], *commands: Sequence[object]) -> tuple[list[Any], list[str]]:
    """The exit code, stdout and errors as JSON of each command, and which heavy packages were imported."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps([packages, [[*map(str, arguments), "--json-errors"] for arguments in commands]]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results, heavy = json.loads(done.stdout)
    return results, heavy


def commands(toy_checkpoint: Path, toy_artifact: Path, folder: Path) -> dict[str, list[object]]:
    """One call of each command that builds or checks."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'source = "{toy_checkpoint}"\nartifact = "{folder / "built"}"\n')
    return {
        "convert": ["convert", toy_checkpoint, "--artifact", folder / "built"],
        "compile": ["compile", "--artifact", toy_artifact, "--size", "96x64", "--frames", 5],
        "verify": ["verify", "--artifact", toy_artifact],
        "build": ["build", recipe],
        "toy": ["toy", folder / "toy"],
    }


def test_commands_name_the_extra(toy_checkpoint: Path, toy_artifact: Path, tmp_path: Path) -> None:
    calls = commands(toy_checkpoint, toy_artifact, tmp_path)
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
