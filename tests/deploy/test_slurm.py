"""The script for Slurm: shellcheck, and its run with programs in the places of wanrun and scontrol."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from helpers.deploy import DEPLOY, unknown

SCRIPT: Final = DEPLOY / "slurm" / "videos.sbatch"
SHELLCHECK: Final = Path(sys.executable).with_name("shellcheck")

WANRUN: Final = """#!/bin/bash
printf '%s\\n' "$@" > "$PLACE/arguments"
trap 'exit 143' TERM
touch "$PLACE/runs"
[[ $ENDS ]] && exit "$ENDS"
for _ in {1..500}; do sleep 0.02; done
"""


NUMBERS: Final = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "7"}
"""Of the last task of an array, whose job has the array's own number."""


@dataclass
class Task:
    """A task of the array that runs here."""

    place: Path
    process: subprocess.Popen[str]

    def end(self, number: signal.Signals | None = None) -> int:
        """Waits until wanrun runs, sends the script a signal, and waits for its end."""
        end = time.monotonic() + 10
        while not (self.place / "runs").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        if number is not None:
            self.process.send_signal(number)
        self.said = self.process.communicate(timeout=10)[1]
        return self.process.returncode

    @property
    def put_back(self) -> list[str]:
        """What scontrol was told."""
        file = self.place / "scontrol"
        return file.read_text().splitlines() if file.exists() else []


def begin(tmp_path: Path, ends: str = "", **variables: str) -> Task:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "wanrun").write_text(WANRUN)
    (programs / "scontrol").write_text('#!/bin/bash\necho "$@" >> "$PLACE/scontrol"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PLACE": str(tmp_path), "ENDS": ends}
    process = subprocess.Popen(
        ["bash", SCRIPT, "/shared/an artifact", "/shared/prompts.txt", "/shared/videos"],
        env={**environment, **NUMBERS, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    return Task(tmp_path, process)


def directives() -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == SCRIPT.read_text(encoding="utf-8").count("#SBATCH")
    return dict(lines)


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run([SHELLCHECK, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0


def test_directives_come_before_the_commands() -> None:
    """sbatch reads none after the first command."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_a_task_has_a_gpu_a_log_and_time_to_end() -> None:
    given = directives()
    assert given["array"].startswith("0-") and given["gres"] == "gpu:1" and given["ntasks"] == "1"
    assert {"%A", "%a"} <= set(re.findall(r"%\w", given["output"])) and given["open-mode"] == "append"
    assert "requeue" in given
    hours, minutes, seconds = map(int, given["time"].split(":"))
    batch, ahead = re.fullmatch(r"(B):USR1@(\d+)", given["signal"]).groups()  # type: ignore[union-attr]
    assert batch == "B" and 60 < int(ahead) < hours * 3600 + minutes * 60 + seconds


def test_options_exist(tmp_path: Path) -> None:
    assert begin(tmp_path, "0").end() == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[0] == "/shared/an artifact" and "/shared/prompts.txt" in arguments
    assert arguments[-1] == "/shared/videos/{index}-{slug}.mp4"
    assert unknown(arguments) == set()
    assert arguments[arguments.index("--shard") + 1] == "auto"
    assert shlex.join(arguments).count("--") == 3  # so all options are seen


@pytest.mark.parametrize("code", [0, 2, 3])
def test_its_end_is_that_of_wanrun(tmp_path: Path, code: int) -> None:
    task = begin(tmp_path, str(code))
    assert task.end() == code
    assert task.put_back == []


def test_before_the_time_limit_it_ends_and_is_put_back(tmp_path: Path) -> None:
    task = begin(tmp_path, SLURM_RESTART_COUNT="3")
    assert task.end(signal.SIGUSR1) == 143
    assert task.put_back == ["requeue 77_7"]


def test_a_refusal_to_put_it_back_keeps_the_exit_code(tmp_path: Path) -> None:
    task = begin(tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    assert task.end(signal.SIGUSR1) == 143


def test_what_is_cancelled_is_not_put_back(tmp_path: Path) -> None:
    task = begin(tmp_path)
    assert task.end(signal.SIGTERM) == 143
    assert task.put_back == []


def test_what_never_ends_is_given_up(tmp_path: Path) -> None:
    task = begin(tmp_path, SLURM_RESTART_COUNT="20")
    assert task.end(signal.SIGUSR1) == 143
    assert task.put_back == [] and "started 21 times" in task.said


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "/artifact"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "ARTIFACT PROMPTS FOLDER" in done.stderr
