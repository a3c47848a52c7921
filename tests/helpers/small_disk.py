"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[bool]:
    """A file system of this size at the folder; yields whether it could be mounted, which takes root."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", folder], check=True)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """A file system of this size at the folder; skips where it cannot be mounted."""
    with mounted(folder, nbytes) as done:
        if not done:
            pytest.skip("a small file system can be mounted by root only")
        yield


def fill(folder: Path, spare: int = 0) -> Path:
    """Fills a folder's file system but for some bytes; returns the file that does."""
    path = folder / ".filler"
    status = os.statvfs(folder)
    with path.open("wb") as file:
        file.write(bytes(status.f_bavail * status.f_frsize - spare))
    return path
