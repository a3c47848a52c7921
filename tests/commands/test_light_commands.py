"""What answers at once: version, help and the list of profiles, without anything heavy."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_version_help_and_list(cli: Any, toy_artifact: Path) -> None:
    for program in ("wanrun", "wanbuild"):
        assert cli.succeeds(program, "--version").startswith(f"{program}, version ")
        text = cli.succeeds(program, "--help")
        assert text == cli.succeeds(program, "-h")
        assert text.startswith(f"Usage: {program} ")
    text = cli.succeeds("wanrun", "--help")
    for option in (
        "artifact",
        "prompt",
        "size",
        "seed",
        "guidance-scale-2",
        "boundary",
        "loop",
        "timing-json",
    ):
        assert f"--{option} " in text
    first, second = cli.succeeds("wanrun", "--artifact", toy_artifact, "--list").splitlines()
    assert first.startswith("wan2.1-t2v  sha256:")
    assert second == "96x64x9-b1-cfg  targets: cpu"


LOADED = """
import sys
sys.argv = ["wanrun", *sys.argv[1:]]
import wanrun
{}
heavy = {{"jax", "flax", "numpy", "orbax", "tensorstore", "ml_dtypes", "PIL"}} & sys.modules.keys()
assert not heavy, heavy
"""
RUN = "from {0} import {1}\nfrom wancli.console import run\nassert run({1}) == 0"


def _seconds(command: list[str], runs: int = 7) -> float:
    """Median CPU time of a command: other programs may keep it waiting."""
    times = []
    for _ in range(runs):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(times)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "arguments", "most"),
    [
        ("", "", 1),
        (RUN.format("wancli.run", "wanrun"), "--help", 4),
        (RUN.format("wancli.run", "wanrun"), "--artifact {} --list", 4),
        (RUN.format("wanbuild.cli", "wanbuild"), "--help", 4),
        (RUN.format("wanbuild.cli", "wanbuild"), "compile --help", 4),
    ],
    ids=["import", "help", "list", "help of wanbuild", "help of compile"],
)
def test_light_commands_load_nothing_heavy(code: str, arguments: str, most: int, toy_artifact: Path) -> None:
    command = [sys.executable, "-c", LOADED.format(code), *arguments.format(toy_artifact).split()]
    needed = _seconds([sys.executable, "-c", "import click, msgspec"])  # in the same minute: machines differ
    assert _seconds(command) < most * needed
