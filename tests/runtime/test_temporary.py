"""Temporary files: removed at the end, whatever it is, and those of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanrun.temporary import (
    FORGOTTEN_SECONDS,
    remove_abandoned,
    temporary_folder,
    temporary_path,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from wanrun.temporary import temporary_folder, temporary_path

place = Path(sys.argv[1])
with temporary_path(place / "video.mp4", ".mp4") as path, temporary_folder(place) as folder:
    path.write_bytes(b"half")
    (folder / "entry").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_renamed_file_stays_and_another_goes(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    with temporary_path(target, ".json") as path:
        assert (path.parent, path.suffix, path.exists()) == (tmp_path, ".json", False)
        path.write_text("{}")
        path.rename(target)
    with pytest.raises(RuntimeError), temporary_path(target) as path:
        path.write_text("half")
        raise RuntimeError
    with temporary_folder(tmp_path) as folder:
        (folder / "entry").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with temporary_path(tmp_path / "b"):
        assert list(tmp_path.iterdir()) == []


def test_what_a_process_still_writes_stays(tmp_path: Path) -> None:
    with temporary_path(tmp_path / "a") as path:
        path.write_text("half")
        os.utime(path, (0, 0))
        remove_abandoned(tmp_path)
        assert path.exists()


def test_files_of_other_machines_stay_for_a_day(tmp_path: Path) -> None:
    names = [".wan-00000000-1-0000abcd.mp4", ".wan-00000000-1-0000cdef.mp4"]
    for name in names:
        (tmp_path / name).write_text("")
    old = time.time() - FORGOTTEN_SECONDS - 60
    os.utime(tmp_path / names[0], (old, old))
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]
    remove_abandoned(tmp_path / "nothing")  # no folder, no error


@pytest.mark.parametrize(
    "name",
    [
        ".wan-models",
        ".wan-xy.tmp",
        ".wan-00000000-1-ab.mp4",
        ".wan-00000000-1-0000abcd-2",
        ".wan-{machine}-1-0000abcd.tar.gz",
        ".wan-{machine}-x-0000abcd",
        "wan-00000000-1-0000abcd.mp4",
    ],
)
@pytest.mark.parametrize("folder", [True, False])
def test_what_has_another_name_is_the_user_s(tmp_path: Path, name: str, folder: bool) -> None:
    with temporary_path(tmp_path / "a") as path:
        machine = path.name.split("-")[1]
    theirs = tmp_path / name.format(machine=machine)
    if folder:
        theirs.mkdir()
        (theirs / "model").write_text("theirs")
    else:
        theirs.write_text("theirs")
    os.utime(theirs, (0, 0))
    remove_abandoned(tmp_path)
    assert theirs.exists() and (not folder or (theirs / "model").exists())
