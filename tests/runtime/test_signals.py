"""Signals that arrive where an exception does not help, in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WHERE = """
import hashlib, signal, sys, threading, time
from pathlib import Path

import click

from wanrun.console import leave, run
from wanrun.early import start
from wanrun.temporary import temporary_path


@click.command("wanrun")
@click.argument("where")
@click.argument("folder", type=Path)
def command(where, folder):
    with temporary_path(folder / "video.mp4") as half:
        half.write_bytes(b"half")
        if where == "xla":  # as XLA does: no lock of the interpreter is held, and no signal is handled
            threading.Timer(1, ready).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
        elif where == "import":
            sys.path.insert(0, str(folder))
            import slow
        else:
            ready()
            time.sleep(60)


def ready():
    print("ready", flush=True)


start()
if sys.argv[1] == "early":
    ready()
    time.sleep(60)
leave(run(command))
"""

SLOW = """
import time
print("ready", flush=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.01)
print("imported", flush=True)
"""

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n", signal.SIGHUP: "hung up\n"}


def interrupted(where: str, folder: Path, number: signal.Signals) -> tuple[int, str, str, float]:
    """Exit code, what was printed on both streams, and seconds from the signal to the end."""
    command = [sys.executable, "-c", WHERE, where, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sent = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - sent


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("where", ["early", "sleep"])
def test_each_signal_has_its_word_and_code(where: str, number: signal.Signals, tmp_path: Path) -> None:
    code, _, err, _ = interrupted(where, tmp_path, number)
    assert (code, err) == (CODES[number], WORDS[number])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_import_is_finished_first(tmp_path: Path) -> None:
    """An extension module that is left in the middle of its initialisation crashes the process."""
    (tmp_path / "slow.py").write_text(SLOW)
    code, out, err, _ = interrupted("import", tmp_path, signal.SIGTERM)
    assert (code, out, err) == (143, "imported\n", "terminated\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"slow.py", "__pycache__"}


@pytest.mark.slow
def test_a_call_that_does_not_return_is_not_waited_for(tmp_path: Path) -> None:
    code, _, err, seconds = interrupted("xla", tmp_path, signal.SIGINT)
    assert (code, err) == (130, "interrupted\n")
    assert 3 <= seconds < 15  # the grace, on a busy machine
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    command = ["nohup", sys.executable, "-c", WHERE, "sleep", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
