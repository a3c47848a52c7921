"""What answers at once: version, help and the list of profiles, without anything heavy."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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
heavy = {{"jax", "numpy", "orbax", "tensorstore", "ml_dtypes", "PIL"}} & sys.modules.keys()
assert not heavy, heavy
"""


def _seconds(command: list[str], runs: int = 7) -> float:
    """Median CPU time of a command: other programs may keep it waiting."""
    times = []
    for _ in range(runs):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(times)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("import", ""),
        (
            "help",
            "from wancli.run import wanrun\nfrom wancli.console import run\nassert run(wanrun) == 0",
        ),
        (
            "list",
            "from wancli.run import wanrun\nfrom wancli.console import run\nassert run(wanrun) == 0",
        ),
    ],
)
def test_light_commands_load_nothing_heavy(what: str, code: str, toy_artifact: Path) -> None:
    arguments = {"import": [], "help": ["--help"], "list": ["--artifact", str(toy_artifact), "--list"]}[what]
    command = [sys.executable, "-c", LOADED.format(code), *arguments]
    needed = _seconds([sys.executable, "-c", "import click, msgspec"])  # in the same minute: machines differ
    assert _seconds(command) < {"import": 1, "help": 4, "list": 4}[what] * needed
