"""Puts files into the page cache or drops them from it, and checks the effect."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK_BYTES = 2**20
READ_THREADS = 4
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COLD_FRACTION = 0.01
"""A file set up to this resident fraction counts as cold: shared or locked pages cannot be dropped."""


def resident_fraction(files: Sequence[Path]) -> float:
    """Returns the fraction of these files' pages in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            found = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
            failed = libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
            )
            del view  # otherwise the mapping cannot be closed
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += found.size
        resident += int(np.count_nonzero(found & 1))
    return resident / max(pages, 1)


def _read(path: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def warm(files: Sequence[Path]) -> float:
    """Reads every file once; returns the resident fraction."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(_read, files))
    return resident_fraction(files)


def _drop(files: Sequence[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(files: Sequence[Path]) -> float:
    """Drops every file from the page cache; returns the resident fraction, which should be about 0."""
    _drop(files)
    fraction = resident_fraction(files)
    if fraction > COLD_FRACTION:  # dirty pages cannot be dropped
        os.sync()
        _drop(files)
        fraction = resident_fraction(files)
    return fraction


def cold_machine(files: Sequence[Path]) -> str:
    """Drops all of the page cache, as root may do, or only these files; returns which, in words."""
    os.sync()
    try:
        DROP_CACHES.write_text("1")
    except OSError as error:
        way = f"these files alone: all of it may not be dropped ({error.strerror})"
    else:
        way = "all files, also those of Python's packages"
    return f"{way}; {cold(files):.0%} of these are left in it"
