"""The first moments of a command, and its end: by a signal, whatever its threads do, or as its child's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wancli.jobs.run_options import SEVERAL, RunOptions
from wancli.parent import CHILD, OPTIONS
from wanrun.rows import rows_of

SCRIPT = """
from wancli.early import start

start()

import gc, hashlib, importlib.machinery, os, sys, threading, time
from pathlib import Path

import click
import msgspec

from wanrun.errors import ArtifactError
from wanrun.media.ffmpeg import run_ffmpeg
from wancli.console import leave, run
from wanrun.temporary import temporary_path
from wanrun.undo import begun


def ready():
    print("ready", flush=True)


def sleep(folder):
    ready()
    time.sleep(60)


def xla(folder):  # as XLA does: no lock of the interpreter is held, and no handler is called
    threading.Timer(1, ready).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)


def importing(folder):
    with temporary_path(folder / "module", ".py") as path:
        path.write_text("import time\\nprint('ready', flush=True)\\ntime.sleep(60)")
        sys.dont_write_bytecode = True
        importlib.machinery.SourceFileLoader("module", str(path)).load_module()


def removing(folder):  # the first removal takes its time
    unlink, first = Path.unlink, iter([sleep])
    Path.unlink = lambda path: next(first, unlink)(path)


def hashing(folder):  # an extension module drops what is raised in a function that it calls
    class Hashed(type):
        def __hash__(self):
            sleep(folder)
            return 0

    msgspec.msgpack.Decoder(Hashed("Hashed", (), {}))


def collecting(folder):  # Python drops what is raised in a callback of its garbage collector
    gc.callbacks.append(lambda phase, info: sleep(folder))
    gc.collect()


def ignoring(folder):
    try:
        sleep(folder)
    except BaseException:
        time.sleep(60)


def failing(folder):  # another thread fails because of the end, and so does this one
    try:
        with begun(lambda: None, lambda none: (os.close(-1), time.sleep(1))):
            ready()
            while True:
                time.sleep(0.001)
    finally:
        raise ArtifactError("cannot be read")


def writing(folder):  # files as fast as they can be made
    ready()
    while True:
        with temporary_path(folder / "quick") as path:
            path.write_bytes(b"half")


def beginning(folder):
    def begin():
        ready()
        time.sleep(0.5)
        return "begun"

    with begun(begin, lambda word: print(word, flush=True)):
        time.sleep(60)


def encoding(folder):
    with begun(lambda: None, lambda none: time.sleep(0.5)):  # the thread sees meanwhile that ffmpeg has ended
        threading.Thread(target=run_ffmpeg, args=(["out.mp4"],)).start()
        while not Path(os.environ["STARTED"]).exists():
            time.sleep(0.01)
        xla(folder)


@click.command("wanrun")
@click.argument("where")
@click.argument("folder", type=Path)
def command(where, folder):
    with temporary_path(folder / "video.mp4") as half:
        half.write_bytes(b"half")
        globals()[where](folder)


leave(run(command))
"""


NOTHING_IGNORED = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""
"""libtpu, which another test of this process may have loaded, ignores SIGHUP, and children inherit that."""


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n", signal.SIGHUP: "hung up\n"}


def interrupted(
    where: str, folder: Path, number: signal.Signals, *more: signal.Signals
) -> tuple[int, str, str, float]:
    """Exit code, what was printed on both streams, and seconds from the signal to the end."""
    command = [sys.executable, "-c", NOTHING_IGNORED + SCRIPT, where, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sent = time.monotonic()
        for one in (number, *more):
            process.send_signal(one)
            time.sleep(0.05 if more else 0)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - sent


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_each_signal_has_its_word_and_code(number: signal.Signals, tmp_path: Path) -> None:
    code, _, err, _ = interrupted("sleep", tmp_path, number)
    assert (code, err) == (CODES[number], WORDS[number])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "out"),
    [
        ("xla", ""),
        ("importing", ""),
        ("removing", ""),
        ("hashing", ""),
        ("collecting", ""),
        ("ignoring", ""),
        ("failing", ""),
        ("writing", ""),
        ("beginning", "begun\n"),
    ],
)
def test_a_signal_ends_whatever_is_done(where: str, out: str, tmp_path: Path) -> None:
    """Within 3 s, with one word, and nothing that was under way is left."""
    code, printed, err, seconds = interrupted(where, tmp_path, signal.SIGTERM)
    assert (code, printed, err) == (143, out, "terminated\n")
    assert seconds < 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["failing", "beginning"])
def test_a_second_signal_changes_nothing(where: str, tmp_path: Path) -> None:
    code, _, err, _ = interrupted(where, tmp_path, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    assert (code, err) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    command = ["nohup", sys.executable, "-c", SCRIPT, "sleep", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


@pytest.mark.thorough
@pytest.mark.slow
def test_ffmpeg_ends_before_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write its file after this has been removed."""
    ffmpeg, started = tmp_path / "ffmpeg", tmp_path / "started"
    ffmpeg.write_text(f"#!/bin/sh\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60\n")
    ffmpeg.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(ffmpeg))
    monkeypatch.setenv("STARTED", str(started))
    (tmp_path / "folder").mkdir()
    code, out, err, _ = interrupted("encoding", tmp_path / "folder", signal.SIGTERM)
    assert (code, out, err) == (143, "", "terminated\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), signal.SIGKILL)
    assert list((tmp_path / "folder").iterdir()) == []


STREAMS = """
import os, sys
from pathlib import Path

from wancli.early import start

start()
from wanrun.terminal.status import Status  # which asks whether stderr is a terminal

with Status(lambda: ()):
    pass
print("out")
print("err", file=sys.stderr)
with Path(sys.argv[1]).open("w") as file:
    file.write(f"{file.fileno()}")
"""


@pytest.mark.parametrize(("options", "words"), [([], ""), (["-W", "default"], "overflow encountered")])
def test_warnings_of_libraries_are_not_for_users(options: list[str], words: str) -> None:
    code = "from wancli.early import start; start(); import numpy, warnings; numpy.float32(3e38) * 9"
    code += "; warnings.warn('Corrupt EXIF data')"  # as Pillow does
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and words in done.stderr and (words or not done.stderr)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_does_not_end_a_run(closed: str, tmp_path: Path) -> None:
    """And no file gets the number of a standard stream, to which libraries write."""
    script, result = tmp_path / "script.py", tmp_path / "result"
    script.write_text(STREAMS)
    shell = f'exec "{sys.executable}" "{script}" "{result}" {closed}'
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(result.read_text()) > 2
    assert done.stdout == ("" if "1>" in closed else "out\n")
    assert done.stderr == ("" if "2>" in closed else "err\n")


# The parent of a command of several processes.


PARENT = """
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


def command_of(folder: Path, number: int, state: str = "joined") -> subprocess.Popen[str]:
    """A command whose child ends with an exit code, or by a signal, -SIGURG for none."""
    arguments = [str(folder), str(number), state, "--process-id=0"]
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_command_of_several_has_a_parent() -> None:
    assert set(OPTIONS) == {row.flag for row in rows_of(RunOptions) if row.section == SEVERAL}


def test_an_exit_code_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray variable names no open file, and does not count."""
    monkeypatch.setenv(CHILD, "999")
    done = command_of(tmp_path, 3)
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
    done = command_of(tmp_path, number, state)
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
    running = command_of(tmp_path, -signal.SIGURG)
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
