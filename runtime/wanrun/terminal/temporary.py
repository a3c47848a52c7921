"""Temporary files beside what they will replace, and their removal: by the process, or by a later one.

A name says which process made the file: ``.wan-<machine>-<process>-<random><suffix>``. A process that was
killed leaves its files, and the next one that writes into the folder removes them. What has another name is
somebody else's, and stays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from wanrun.terminal.undo import undone_at_exit

NAME = re.compile(r"\.wan-([0-9a-f]{8})-([0-9]+)-[0-9a-f]{8}(\.[^./]+)?")
"""The names, with the machine and the process."""

FORGOTTEN_SECONDS = 24 * 3600
"""Age of a file of another machine, whose processes cannot be seen, that is taken for abandoned."""


@contextlib.contextmanager
def temporary_path(target: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A free name in a target's folder. What is there at the end is removed: renamed, it stays.

    Args:
        target: what it will be renamed to.
        suffix: of the name.
    """
    folder = target.absolute().parent
    remove_abandoned(folder)
    path = folder / f".wan-{_machine()}-{os.getpid()}-{os.urandom(4).hex()}{suffix}"
    with undone_at_exit(functools.partial(_remove, path)):
        try:
            yield path
        finally:
            _remove(path)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder in a parent, removed at the end with all that it holds."""
    with temporary_path(parent / "folder", "") as path:
        path.mkdir(mode=0o700)
        yield path


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that it holds, as far as that can be removed.

    A read-only folder keeps what is in it. The user's own are made writable first.
    """
    _make_writable(folder)
    for parent, names, _ in os.walk(folder):
        for name in names:
            _make_writable(Path(parent, name))
    shutil.rmtree(folder, ignore_errors=True)


def _make_writable(folder: Path) -> None:
    with contextlib.suppress(OSError):
        mode = folder.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary files in a folder whose processes are gone; errors are passed over."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (name := NAME.fullmatch(entry.name)) is not None and _abandoned(entry, name[1], name[2]):
                _remove(Path(entry.path))


def _abandoned(entry: os.DirEntry[str], machine: str, process: str) -> bool:
    if machine == _machine():
        return not Path(f"/proc/{process}").exists() if Path("/proc/self").exists() else False
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > FORGOTTEN_SECONDS
    except OSError:  # another process removed it
        return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()


def _machine() -> str:
    """Names where a process number is valid: this boot of the machine, and the container if there is one."""
    known = []
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        known.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no path
    return f"{zlib.crc32(''.join(known).encode()):08x}"
