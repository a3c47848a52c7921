"""Changing an artifact: however that ends, no file is left that its manifest does not list."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wanbuild.staging import changing, unlisted
from wanrun.artifact.artifact import open_artifact

NEW = ("programs/new.stablehlo", "executables/cpu/new-cache", "executables/cpu/.new/half", "golden/new.json")

CHANGES = """
import signal, sys, threading
from pathlib import Path

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whatever the tests were started by ignores
    signal.signal(number, signal.SIG_DFL)

from wancli.early import start

start()
from wanbuild.staging import changing

artifact = Path(sys.argv[1])
with changing(artifact):
    for name in sys.argv[2:]:
        (artifact / name).parent.mkdir(exist_ok=True)
        (artifact / name).write_bytes(b"new")
    print("written", flush=True)
    threading.Event().wait()
"""


def left(artifact: Path) -> list[Path]:
    return list(unlisted(open_artifact(artifact)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_a_signal(artifact_copy: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHANGES, str(artifact_copy), *NEW],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        assert len(left(artifact_copy)) >= len(NEW)
        process.send_signal(number)
        try:
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
    assert left(artifact_copy) == []
    assert not list(artifact_copy.parent.glob(f".{artifact_copy.name}.*"))


def test_an_error(artifact_copy: Path) -> None:
    with pytest.raises(ZeroDivisionError), changing(artifact_copy):
        (artifact_copy / NEW[0]).write_bytes(b"new")
        raise ZeroDivisionError
    assert left(artifact_copy) == []
    with changing(artifact_copy):
        (artifact_copy / NEW[0]).write_bytes(b"new")
    assert left(artifact_copy) == []


SLOW = """
import fcntl, signal, sys, time
from pathlib import Path

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)

from wancli.early import start

start()
from wanbuild import staging


def slow(function):
    def called(*arguments, **options):
        print("here", flush=True)
        time.sleep(0.4)
        return function(*arguments, **options)

    return called


if sys.argv[2] == "taking":
    fcntl.flock = slow(fcntl.flock)
else:
    Path.unlink = slow(Path.unlink)
with staging.build_lock(Path(sys.argv[1])):
    pass
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["taking", "giving back"])
def test_a_signal_while_the_lock_changes_hands(moment: str, tmp_path: Path) -> None:
    """Between the making of its file and the lock, and between the work and the file's removal."""
    command = [sys.executable, "-c", SLOW, str(tmp_path / "artifact"), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert list(tmp_path.glob(".artifact.lock"))
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
