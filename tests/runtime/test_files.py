"""Files are written whole or not at all; temporary ones go; names that a manifest gives stay inside."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import refuses
from wanrun import files
from wanrun.errors import ArtifactError
from wanrun.files import (
    canonical_json,
    check_digest,
    digest_found,
    file_sha256,
    open_regular,
    plain_relative,
    replace_file,
    sealed,
    sha256_of,
    unsealed,
    user_cache,
    write_durable,
)
from wanrun.temporary import FORGOTTEN_SECONDS, remove_abandoned, temporary_folder, temporary_path

# --- files ---


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"", b"new" * 1000):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*arguments: object) -> None:
        raise error("full")

    monkeypatch.setattr(files.os if step == "fsync" else Path, step, fail)
    with pytest.raises(error, match="full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is fsynced when it is whole, and the folder after the name is there."""
    seen: list[tuple[str, bytes]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        whole = (path / "file").read_bytes() if path.is_dir() else path.read_bytes()
        seen.append(("folder" if path.is_dir() else "file", whole))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", record)
    replace_file(tmp_path / "file", b"data")
    assert seen == [("file", b"data"), ("folder", b"data")]
    write_durable(tmp_path / "file", b"more")
    assert seen[2:] == [("file", b"more")]


def test_json_has_one_spelling() -> None:
    assert (
        canonical_json({"b": [1, 2.5, None], "a": {"é": True}}) == b'{"a":{"\\u00e9":true},"b":[1,2.5,null]}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    digest = hashlib.sha256(b"data").hexdigest()
    assert (
        sha256_of(b"data") == file_sha256(tmp_path / "file") == digest_found(tmp_path / "file", 4) == digest
    )
    assert "3 bytes" in digest_found(tmp_path / "file", 3)
    assert digest_found(tmp_path / "none", 4) == os.strerror(errno.ENOENT)
    assert digest_found(tmp_path, 2**20) == os.strerror(errno.EISDIR)
    check_digest(digest, digest, "it is damaged", "copy it")
    with refuses("damaged", ArtifactError, expected=f"sha256 {digest}", found="none", remedy="copy it"):
        check_digest("none", digest, "it is damaged", "copy it")


def test_a_sealed_file_is_whole_and_its_own() -> None:
    whole = sealed("name", b"data")
    assert whole.startswith(b"data") and unsealed("name", whole) == b"data"
    for name, content in (("other", whole), ("name", whole[1:]), ("name", whole[:-1]), ("name", b"")):
        with pytest.raises(ValueError, match="digest"):
            unsealed(name, content)


def test_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/wanrun")
    monkeypatch.setenv("HOME", "/home/anna")
    for unset in ("", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "") if unset == "" else monkeypatch.delenv("XDG_CACHE_HOME")
        assert user_cache() == Path("/home/anna/.cache/wanrun")


@pytest.mark.parametrize("name", ["a", "a/b.c", "weights/x-1/é", "a b", "..a", "a..", "-", "~"])
def test_plain_names_are_taken(name: str) -> None:
    assert plain_relative(name, "it") == name


@pytest.mark.parametrize("name", ["", ".", "..", "C:a", 1, None, ["a"]])
def test_other_names_are_refused(name: Any) -> None:
    with refuses("untrusted", ArtifactError, what="it ", found=repr(name)):
        plain_relative(name, "it")


@given(st.text(st.sampled_from("ab./\\:~ \n\0"), max_size=8))
def test_what_is_taken_stays_inside(name: str) -> None:
    try:
        plain_relative(name, "it")
    except ArtifactError:
        return
    inside = os.path.normpath(f"/artifact/{name}")  # what the name means
    assert inside == f"/artifact/{name}" and not {*"\\\n\0"} & {*name}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the file closes itself
def test_an_exception_right_after_opening_stays_the_exception(tmp_path: Path) -> None:
    """A signal may raise when the file is open and not yet returned: no second close may hide it."""
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    opened = list[int]()

    def interrupt(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and function is open:
            opened.append(1)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            open_regular(path)
    finally:
        sys.setprofile(None)
    assert opened == [1]


# --- temporary ---


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
