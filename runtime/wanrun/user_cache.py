"""Folders of the user's cache, each made, locked and removed as a whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wanrun.errors import UsageError
from wanrun.files import user_cache
from wanrun.temporary import remove_tree

RECENT_SECONDS = 3600.0
"""How long a folder stays that was used: a process may read more of it, without the lock."""

ASK_SECONDS = 0.1
"""How often a process looks again for a lock that another one has."""


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the user's cache; folders of its ``kind`` that were used longest ago make room for others.

    ``what`` names the content, for messages; ``most`` are the bytes that all of the kind may have together.
    """

    kind: str
    name: str
    what: str
    most: int = 8 * 2**30

    @property
    def path(self) -> Path:
        """Where it is, or would be."""
        return user_cache() / self.kind / self.name

    def make(self) -> Path:
        """Makes the folder, marks it as used, returns its path; raises UsageError if it cannot be written."""
        with self._written():
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self.use()
        return self.path

    def use(self) -> None:
        """Marks the folder as used now, if it is there and is this user's."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    @contextlib.contextmanager
    def held(self, check: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Holds the folder's lock, which one process has at a time; it ends with the process.

        ``check`` is called again and again while another process has the lock; what it raises ends the wait.
        Raises UsageError if the cache cannot be written.
        """
        with self._written():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = _opened(self.path)
        try:
            while not _taken(lock):
                check()
                time.sleep(ASK_SECONDS)
            yield
        finally:
            os.close(lock)

    def make_room(self) -> None:
        """Removes other folders of the kind, the one used longest ago first, until all have ``most`` bytes.

        Those that a process holds, or that one has used within ``RECENT_SECONDS``, stay; so does this one,
        whose lock the caller has.
        """
        recent = time.time() - RECENT_SECONDS
        folders = [one for one in self.path.parent.iterdir() if one.is_dir()]
        sizes = {one: _nbytes(one) for one in folders}
        for one in sorted(folders, key=_used):
            if sum(sizes.values()) <= self.most:
                break
            if one != self.path and _removed(one, recent):
                del sizes[one]

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                "unwritable",
                f"{self.what} cannot be kept in {self.path}",
                found=error.strerror,
                remedy="set XDG_CACHE_HOME to a folder that can be written",
            ) from None


def _opened(folder: Path) -> int:
    """Opens the file whose lock is a folder's."""
    return os.open(folder.with_name(f"{folder.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _taken(lock: int) -> bool:
    """Takes a lock unless another process has it; returns whether it is taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _nbytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process removes it
            total += file.lstat().st_size
    return total


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _removed(folder: Path, recent: float) -> bool:
    """Removes a folder, unless a process holds it, or has used it since a time."""
    lock = _opened(folder)
    try:
        if free := _taken(lock) and _used(folder) < recent:
            remove_tree(folder)
    finally:
        os.close(lock)
    return free
