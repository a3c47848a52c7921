"""Temporary files next to what they will replace, and their removal: by the process, or by a later one.

A name says which process made the file: ``.wan-<machine>-<process>-<random><suffix>``. What has another name
is another program's, and stays.
"""

from __future__ import annotations

__all__ = ["remove_abandoned", "remove_tree", "temporary_folder"]

import contextlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from wanrun.undo import begun

NAME = re.compile(r"\.wan-([0-9a-f]{8})-([0-9]+)-[0-9a-f]{8}(\.[^./]+)?")
"""The names, with the machine and the process."""

FORGOTTEN_SECONDS = 24 * 3600
"""Age of a file of another machine, whose processes cannot be seen, that is taken for abandoned."""


def temporary_path(target: Path, suffix: str = ".tmp") -> contextlib.AbstractContextManager[Path]:
    """Returns a context with a free name next to a target; a file that is there at its end is removed."""
    folder = target.absolute().parent
    remove_abandoned(folder)
    path = folder / f".wan-{_machine()}-{os.getpid()}-{os.urandom(4).hex()}{suffix}"
    return begun(lambda: path, remove_tree)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder in a parent, removed at the end with all that it holds."""
    with temporary_path(parent / "folder", "") as path:
        path.mkdir(mode=0o700)
        yield path


def remove_tree(path: Path) -> None:
    """Removes a file, or a folder with all that it holds, as far as it can; read-only folders too."""
    with contextlib.suppress(OSError):  # it is a folder
        path.unlink()
    below = (Path(parent, name) for parent, names, _ in os.walk(path) for name in names)
    for folder in chain([path], below):
        with contextlib.suppress(OSError):
            if not folder.is_symlink():
                folder.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary files in a folder whose processes are gone; errors are passed over."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (name := NAME.fullmatch(entry.name)) is not None and _abandoned(entry, name[1], name[2]):
                remove_tree(Path(entry.path))


def _abandoned(entry: os.DirEntry[str], machine: str, process: str) -> bool:
    if machine == _machine():
        return Path("/proc/self").exists() and not Path(f"/proc/{process}").exists()
    with contextlib.suppress(OSError):  # another process removed it
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > FORGOTTEN_SECONDS
    return False


def _machine() -> str:
    """Names where a process number is valid: this boot of the machine, and the container if there is one."""
    known = b""
    with contextlib.suppress(OSError):
        known += Path("/proc/sys/kernel/random/boot_id").read_bytes()
        known += os.readlink("/proc/self/ns/pid").encode()  # noqa: PTH115 - no path
    return f"{zlib.crc32(known):08x}"
