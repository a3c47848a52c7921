"""Signals that arrive where an exception does not help, in real processes."""

from __future__ import annotations

import os
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

from wanrun.terminal.console import leave, run
from wanrun.terminal.early import start
from wanrun.terminal.temporary import temporary_path


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
        elif where == "removal":  # the first step of a removal takes its time
            Path.is_dir = lambda path: (ready(), time.sleep(1))[0]
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

UNWINDING = """
import hashlib, os, threading, time
from pathlib import Path

import click
import msgspec

from wanrun.terminal.console import leave, run
from wanrun.errors import ArtifactError
from wanrun.media.ffmpeg import run_ffmpeg
from wanrun.terminal.undo import begun, undone_at_exit


def dropped():
    calls = []

    class Hashed(type):
        def __hash__(self):
            calls.append(self)
            if len(calls) == 1:
                ready()
                time.sleep(60)
            return 0

    msgspec.msgpack.Decoder(Hashed("Hashed", (), {}))
    time.sleep(60)


def dropped_last():
    try:
        ready()
        time.sleep(60)
    except BaseException:
        pass


def replaced():
    try:
        try:
            ready()
            time.sleep(60)
        finally:
            os.close(-1)
    except OSError as error:
        raise ArtifactError("cannot be read") from error


def littered():
    class Remains:
        def __del__(self):
            raise RuntimeError("Event loop is closed")

    async def never():
        pass

    remains, coroutine = Remains(), never()
    try:
        ready()
        time.sleep(60)
    finally:
        thread = threading.Thread(target=os.close, args=(-1,))
        thread.start()
        thread.join()


def beginning():
    def begin():
        ready()
        time.sleep(1)
        print("begun", flush=True)

    with begun(begin, print):
        time.sleep(60)


def encoding():
    with undone_at_exit(lambda: time.sleep(1)):  # the thread sees meanwhile that ffmpeg has ended
        threading.Thread(target=run_ffmpeg, args=(["out.mp4"],)).start()
        while not Path(os.environ["STARTED"]).exists():
            time.sleep(0.01)
        threading.Timer(1, ready).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)


@click.command("wanrun")
@click.argument("where")
def command(where):
    try:
        globals()[where]()
    finally:
        print("unwound", flush=True)


def ready():
    print("ready", flush=True)


leave(run(command))
"""

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n", signal.SIGHUP: "hung up\n"}


def interrupted(
    where: str, folder: Path, number: signal.Signals, script: str = WHERE
) -> tuple[int, str, str, float]:
    """Exit code, what was printed on both streams, and seconds from the signal to the end."""
    command = [sys.executable, "-c", script, where, *([str(folder)] if script is WHERE else [])]
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_removal_is_finished_first(number: signal.Signals, tmp_path: Path) -> None:
    """What was being removed when the signal came is not left there."""
    code, _, err, _ = interrupted("removal", tmp_path, number)
    assert (code, err) == (CODES[number], WORDS[number])
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    ("where", "out"),
    [
        ("dropped", "unwound\n"),
        ("dropped_last", "unwound\n"),
        ("replaced", "unwound\n"),
        ("littered", "unwound\n"),
        ("beginning", "begun\nunwound\n"),
    ],
)
def test_a_signal_stays_one_whatever_becomes_of_its_exception(where: str, out: str, tmp_path: Path) -> None:
    """Dropped by an extension module, replaced by an error of the clean-up, or followed by others."""
    code, printed, err, _ = interrupted(where, tmp_path, signal.SIGTERM, UNWINDING)
    assert (code, printed, err) == (143, out, "terminated\n")


@pytest.mark.slow
def test_ffmpeg_ends_before_a_process_that_does_not_unwind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write its file after this has been removed."""
    ffmpeg, started = tmp_path / "ffmpeg", tmp_path / "started"
    ffmpeg.write_text(f"#!/bin/sh\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60\n")
    ffmpeg.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(ffmpeg))
    monkeypatch.setenv("STARTED", str(started))
    code, out, err, _ = interrupted("encoding", tmp_path, signal.SIGTERM, UNWINDING)
    assert (code, out, err) == (143, "", "terminated\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), signal.SIGKILL)
