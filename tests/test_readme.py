"""README.md says what the commands do, and its commands work in the order in which it gives them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.readme import README, parts, table

TEXT = README.read_text(encoding="utf-8")
REPOSITORY = README.parent

STAND_INS = {"832x480": "96x64", "--frames 81": "--frames 9"}
"""What is smaller here than in README.md, beside the checkpoint."""

HUB_ID = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
"""The checkpoint for which a toy stands in."""


def commands() -> list[str]:
    """The command lines of README.md, in order, without comments."""
    lines = re.findall(r"^    ((?:make|pip|wanbuild|wanrun) .*)$", TEXT, re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def test_the_table_of_options_is_the_commands() -> None:
    """After a change of an option: PYTHONPATH=tests python tests/helpers/readme.py"""
    _, found, _ = parts(TEXT)
    assert found == table()


def test_what_is_made_and_installed_is_there() -> None:
    made = {shlex.split(line)[1] for line in commands() if line.startswith("make ")}
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= made <= set(targets)
    extras = re.findall(r"pip install '\.\[(\w+)\]'", TEXT)
    assert extras
    assert all(f"\n{extra} = [" in (REPOSITORY / "pyproject.toml").read_text() for extra in extras)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert link.startswith("https://") or (REPOSITORY / link).exists(), link


@pytest.mark.slow
def test_a_reader_comes_to_a_video(toy_checkpoint: Path, tmp_path: Path) -> None:
    """Each command as it stands, from the checkpoint to the video, and then the Python beside it."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    lines = [line for line in commands() if line.startswith(("wanbuild ", "wanrun "))]
    assert [line.split()[0] for line in lines] == ["wanbuild"] * 4 + ["wanrun"]
    for line in lines:
        for large, small in STAND_INS.items():
            line = line.replace(large, small)
        out = run(*shlex.split(line.replace(HUB_ID, str(toy_checkpoint))))
    assert out.startswith("wrote cat.mp4 (") and "TIMING SUMMARY" in out
    requirements = re.search(r"pip install \. -r (\S+)", TEXT)
    assert requirements is not None and (tmp_path / requirements[1]).is_file()

    (code,) = re.findall(r"^    import wanrun\n(?:    .*\n)+", TEXT, re.MULTILINE)
    run(sys.executable, "-c", textwrap.dedent(code))
    for video in ("cat.mp4", "again.mp4"):
        assert (tmp_path / video).stat().st_size > 1000
