"""Building an artifact beside the old one: whatever happens on the way, the old or the new one is there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import UNPRIVILEGED
from helpers.refusals import refuses
from wanbuild import staging
from wanbuild.staging import (
    build_lock,
    building_folder,
    changing,
    check_leftover,
    commit,
    leftover,
    unlisted,
)
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.files import replace_file


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what a build leaves ------------------------------------------------------------------------------------


def make(folder: Path, content: str) -> Path:
    """Something with a manifest."""
    folder.mkdir()
    (folder / MANIFEST).write_text(content)
    return folder


@pytest.mark.parametrize(("own", "left"), [("old", "building"), ("new", "replaced"), (None, "replaced")])
def test_what_a_killed_build_leaves_is_removed(tmp_path: Path, own: str | None, left: str) -> None:
    """It was killed before the renames of commit, after them, or between them."""
    if own is not None:
        make(tmp_path / "artifact", own)
    make(tmp_path / f".artifact.{left}", "half" if left == "building" else "old")
    (tmp_path / ".artifact.lock").touch()
    with build_lock(tmp_path / "artifact"):
        assert names_in(tmp_path) == [".artifact.lock", "artifact"]
    assert names_in(tmp_path) == ["artifact"]
    assert (tmp_path / "artifact" / MANIFEST).read_text() == (own or "old")


REPLACE = """
import sys
from pathlib import Path
from wanbuild.staging import build_lock, building_folder, commit

artifact = Path(sys.argv[1])
for content in sys.argv[2:]:
    with build_lock(artifact):
        building_folder(artifact).mkdir()
        (building_folder(artifact) / "manifest.json").write_text(content)
        commit(artifact)
"""


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True])
def test_a_read_only_artifact_is_replaced_and_blocks_no_later_build(tmp_path: Path, left: bool) -> None:
    """Also one that an earlier build could not remove."""
    artifact = make(tmp_path / "artifact", "old")
    if left:
        shutil.copytree(artifact, tmp_path / ".artifact.replaced")
        shutil.copytree(artifact, building_folder(artifact))
    for folder in [path for path in tmp_path.iterdir() if path.is_dir()]:
        inner = folder / "weights" / "a"
        inner.mkdir(parents=True)
        (inner / "0").touch()
        for path in (inner / "0", inner, folder / "weights", folder):
            path.chmod(0o444 if path.is_file() else 0o555)
    command = [sys.executable, UNPRIVILEGED, sys.executable, "-c", REPLACE, artifact, "new", "newer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert names_in(tmp_path) == ["artifact"]
    assert (artifact / MANIFEST).read_text() == "newer"


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to another user. Other builds than one that replaces go on."""
    artifact = make(tmp_path / "artifact", "new")
    make(tmp_path / ".artifact.replaced", "old")
    monkeypatch.setattr(staging, "remove_tree", lambda folder: None)
    with build_lock(artifact):
        assert leftover(artifact) == tmp_path / ".artifact.replaced"
        with refuses("unwritable", what=tmp_path / ".artifact.replaced", remedy="remove"):
            check_leftover(artifact)
    monkeypatch.undo()
    with build_lock(artifact):
        assert leftover(artifact) is None
        check_leftover(artifact)


def test_something_where_the_old_artifact_was(tmp_path: Path) -> None:
    make(tmp_path / ".artifact.replaced", "old")
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "notes.txt").touch()
    place = tmp_path / "artifact"
    with refuses("unwritable", what=place, found=os.strerror(errno.ENOTEMPTY), remedy=place):
        build_lock(place).__enter__()
    assert names_in(tmp_path) == [".artifact.replaced", "artifact"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EEXIST])
def test_what_the_file_system_refuses_is_said_of_the_artifact(tmp_path: Path, number: int) -> None:
    artifact = make(tmp_path / "artifact", "old")
    file = artifact / "programs" / "a"
    with (
        refuses("unwritable", what=artifact, found=f"{file}: {os.strerror(number)}"),
        build_lock(artifact),
    ):
        raise OSError(number, os.strerror(number), str(file))
    for other in (OSError(number, "elsewhere", "/elsewhere/x"), BrokenPipeError(errno.EPIPE, "no file")):
        with pytest.raises(OSError, match=r"elsewhere|no file") as caught, build_lock(artifact):
            raise other
        assert caught.value is other


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_left_to_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    artifact = make(tmp_path / "artifact", "old")
    with pytest.raises(OSError, match="full") as caught, build_lock(artifact):
        raise OSError(number, "full", str(artifact / "x"))
    assert caught.value.errno == number
    with pytest.raises(OSError, match=f"full: '{artifact}'"), build_lock(artifact):
        raise OSError(number, "full")  # of a write to an open file

    def full(path: Path) -> int:
        raise OSError(number, "full", str(path))

    monkeypatch.setattr(staging, "_take_lock", full)
    with pytest.raises(OSError, match="full"), build_lock(artifact):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_between_the_renames_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    artifact = make(tmp_path / "artifact", "old")
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(source) == building_folder(artifact):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(error), build_lock(artifact):
        make(building_folder(artifact), "new")
        commit(artifact)
    assert names_in(tmp_path) == ["artifact"]
    assert (artifact / MANIFEST).read_text() == "old"


def test_all_is_durable_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is fsynced before the artifact gets its name, and the name after."""
    artifact = tmp_path / "artifact"
    building = building_folder(artifact)
    synced: set[int] = set()
    fsync, rename = os.fsync, os.rename
    unsynced: list[list[str]] = []

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check(source: Any, target: Any) -> None:
        everything = [building, *building.rglob("*")]
        unsynced.append([str(path) for path in everything if path.stat().st_ino not in synced])
        rename(source, target)
        synced.clear()

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check)
    with build_lock(artifact):
        for name in ("weights/a/c/0", "weights/a/zarr.json", "weights/b/c/0/0"):
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            (building / name).write_text("x")
        replace_file(building / MANIFEST, b"new")
        commit(artifact)
    assert unsynced == [[]]
    assert tmp_path.stat().st_ino in synced


def test_the_lock_lets_one_in(tmp_path: Path) -> None:
    order: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def second() -> None:
        inside.wait()
        with build_lock(tmp_path / "artifact"):
            order.append("second")
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    with build_lock(tmp_path / "artifact"):
        inside.set()
        assert not done.wait(0.2)
        with build_lock(tmp_path / "neighbour"):  # another artifact is another lock
            order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert names_in(tmp_path) == []


def test_a_parent_that_does_not_exist(tmp_path: Path) -> None:
    place = tmp_path / "no" / "such" / "artifact"
    with refuses("missing_file", what=place.parent), build_lock(place):
        pass


# --- changing an artifact: no file is left that its manifest does not list ----------------------------------


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
        try:
            assert process.stdout is not None and process.stdout.readline() == b"written\n"
            assert len(left(artifact_copy)) >= len(NEW)
            process.send_signal(number)
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
from wanbuild.staging import unlisted


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
        try:
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
            assert list(tmp_path.glob(".artifact.lock"))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
