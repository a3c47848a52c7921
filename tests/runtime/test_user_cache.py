"""Folders of the user's cache: those used longest ago make room, except one that a process holds or reads."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.user_cache import RECENT_SECONDS, CacheFolder


def folder(name: str) -> CacheFolder:
    return CacheFolder("profiles", name, "built profiles", most=100)


def test_the_one_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for age, name in enumerate(["new", "held", "last", "old"]):
        path = folder(name).make()
        (path / "file").write_bytes(bytes(40))
        os.utime(path, (1000 - age, 1000 - age))
    with folder("held").held():
        folder("new").make_room()
        assert sorted(one.name for one in (tmp_path / "wanrun" / "profiles").glob("*/")) == ["held", "new"]
    folder("other").make_room()
    assert folder("new").path.is_dir() and folder("held").path.is_dir()  # 80 bytes
    (folder("new").path / "file").write_bytes(bytes(90))
    folder("held").use()  # by a process that has no lock, and reads more of it later
    folder("new").make_room()
    assert folder("held").path.is_dir()
    later = time.time() + 2 * RECENT_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    folder("new").make_room()
    assert not folder("held").path.exists() and folder("new").path.is_dir()


def test_a_cache_that_cannot_be_written_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for use in (folder("one").make, folder("one").held().__enter__):
        with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
            use()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="XDG_CACHE_HOME") as refused:
        folder("one").make()
    assert refused.value.found == os.strerror(errno.EACCES)
