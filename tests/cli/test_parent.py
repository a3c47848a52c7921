"""The parent of a command: what its child's end becomes, and what is left. The child has no JAX here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wancli.jobs.run_options import SEVERAL, RunOptions
from wancli.parent import CHILD, OPTIONS
from wanrun.rows import rows_of

COMMAND = """
import os, signal, sys, time
from pathlib import Path
from wancli.parent import run_with_parent, tell_end, tell_parent
from wancli.early import start
from wanrun.temporary import temporary_path

start()
run_with_parent()
_, folder, number, joined, _ = sys.argv
with temporary_path(Path(folder, "video")) as path:
    path.write_text("half of it")
    if joined == "joined":
        tell_parent()
        tell_parent([Path(folder)])
    if joined == "failed":
        assert tell_end(7, "error: first")
    assert "WANRUN_CHILD" not in os.environ
    print(os.getpid(), flush=True)
    if int(number) < 0:
        os.kill(os.getpid(), -int(number))
    time.sleep(60 if int(number) < 0 else 0)
    os._exit(int(number))
"""


def command(folder: Path, number: int, state: str = "joined") -> subprocess.Popen[str]:
    """A command whose child ends with an exit code, or by a signal, -SIGURG for none."""
    arguments = [str(folder), str(number), state, "--process-id=0"]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_command_of_several_has_a_parent() -> None:
    assert set(OPTIONS) == {row.flag for row in rows_of(RunOptions) if row.section == SEVERAL}


def test_an_exit_code_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray variable names no open file, and does not count."""
    monkeypatch.setenv(CHILD, "999")
    done = command(tmp_path, 3)
    assert (done.communicate()[1], done.returncode) == ("", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "state", "code", "words"),
    [
        (-signal.SIGABRT, "joined", 5, "another process"),
        (-signal.SIGABRT, "alone", 5, "not all processes"),
        (-signal.SIGABRT, "failed", 7, "first"),
        (-signal.SIGKILL, "joined", 5, "signal 9"),
        (7, "failed", 7, "first"),
    ],
)
def test_a_child_that_is_ended(number: int, state: str, code: int, words: str, tmp_path: Path) -> None:
    """An error that it was about to end with is printed once, and in place of its end by JAX."""
    done = command(tmp_path, number, state)
    (line,) = done.communicate()[1].splitlines()
    assert done.returncode == code and line.startswith("error: ") and words in line
    assert state != "joined" or not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGKILL, -9, "terminated"),
    ],
)
def test_a_signal_to_the_parent_ends_the_child(
    number: signal.Signals, code: int, word: str, tmp_path: Path
) -> None:
    running = command(tmp_path, -signal.SIGURG)
    assert running.stdout is not None
    child = Path("/proc", running.stdout.readline().strip())
    running.send_signal(number)
    assert running.communicate(timeout=30)[1].split() == [word]
    assert running.returncode == code
    end = time.monotonic() + 10
    while (
        child.exists() and time.monotonic() < end
    ):  # a child without a parent is somebody else's to wait for
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())
