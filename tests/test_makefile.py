"""The demo's commands, with programs that only say how they were called: what is there, and the sampling."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*"
case "$*" in
    *"$FAILING"*) exit 3 ;;
    convert*) mkdir "$(echo "$*" | sed 's/.*--artifact \\([^ ]*\\).*/\\1/')" ;;
esac
"""

Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "wanbuild", "wanrun"):
        program = tmp_path / "venv" / "bin" / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
    (tmp_path / "venv" / ".installed-build").touch()
    (tmp_path / "demo" / "artifact").mkdir(parents=True)
    (tmp_path / "demo" / "artifact" / "manifest.json").write_text('"variant": "wan2.1-t2v"')

    def call(*words: str, failing: str = "nothing") -> subprocess.CompletedProcess[str]:
        command = ["make", *words, f"VENV={tmp_path / 'venv'}", f"DEMO={tmp_path / 'demo'}"]
        environment = {"PATH": "/usr/bin:/bin", "FAILING": failing}
        return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)

    return call


@pytest.mark.parametrize("failing", ["--variant typo", "compile", "--record"])
def test_a_demo_that_cannot_be_made_leaves_the_last_one(make: Make, tmp_path: Path, failing: str) -> None:
    failed = make("demo", *(["VARIANT=typo"] if "typo" in failing else []), failing=failing)
    assert failed.returncode == 2 and failing in failed.stdout.splitlines()[-1]
    assert (tmp_path / "demo" / "artifact" / "manifest.json").is_file()


@pytest.mark.parametrize("words", [[], ["SAMPLING=four-steps"]])
def test_the_sampling_is_chosen_for_each_video(make: Make, tmp_path: Path, words: list[str]) -> None:
    """A student is an adapter of the demo's artifact: another video takes it, or the model's own steps."""
    made = make("demo", *words)
    assert made.returncode == 0, made.stderr
    assert not (tmp_path / "demo" / "artifact" / "manifest.json").exists()  # it is the new one
    commands = [line for line in made.stdout.splitlines() if line.startswith("wanbuild ")]
    (compiled,) = [line for line in commands if line.startswith("wanbuild compile")]
    adapted = [line for line in commands if line.startswith("wanbuild lora")]
    assert ("--lora-rank" in compiled) == (len(adapted) == 1) == bool(words)
    assert all({"four-steps", "lightning-4"} <= {*line.split()} for line in adapted)
    (tmp_path / "demo" / "artifact" / "manifest.json").write_text('"variant": "wan2.1-t2v"')
    for chosen in ([], words):
        again = make("again", *chosen)
        assert again.returncode == 0, again.stderr
        (run,) = [line for line in again.stdout.splitlines() if line.startswith("wanrun ")]
        assert ("four-steps" in run) == bool(chosen) and "--steps" not in run


@pytest.mark.parametrize(("words", "port"), [([], "8000"), (["PORT=0"], "0")])
def test_the_server_has_the_port(make: Make, tmp_path: Path, words: list[str], port: str) -> None:
    (tmp_path / "venv" / ".installed-serve").touch()
    served = make("serve", *words)
    assert served.returncode == 0, served.stderr
    assert f" --port {port} " in next(line for line in served.stdout.splitlines() if "wanrun serve" in line)
