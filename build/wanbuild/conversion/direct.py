"""Writes a file once, from start to end, past the page cache where the file system allows it.

A checkpoint should not fill the page cache, and for a large file the cache's bookkeeping costs several times
the write itself (docs/notes/convert.md, "Speed"). O_DIRECT writes from a page-aligned buffer to
aligned offsets; a last part that does not fill the buffer goes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

BUFFER_BYTES = 2**20
"""Bytes per write: a multiple of every block size and of every item size."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # only Linux has it


class WriteBuffer:
    """A page-aligned buffer of one thread, for one file at a time."""

    def __init__(self) -> None:
        self.data = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)


class DirectFile:
    """A new file that is being written; a context manager.

    ``nbytes`` is its final size: a file smaller than the buffer is never written directly. Nobody else may
    use ``buffer`` until the file is closed. The constructor and every method raise OSError if the file cannot
    be written.
    """

    def __init__(self, path: Path, nbytes: int, buffer: WriteBuffer) -> None:
        self._buffer, self._used = buffer.data, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = bool(_DIRECT) and nbytes >= BUFFER_BYTES
        try:
            self._descriptor = os.open(path, flags | (_DIRECT if self._direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False  # tmpfs, for example, has no direct access
            self._descriptor = os.open(path, flags, 0o666)

    def space(self, items: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns buffer space for up to this many next items: as many as fit, at least one."""
        end = min(self._used + items * dtype.itemsize, BUFFER_BYTES)
        end -= (end - self._used) % dtype.itemsize
        return self._buffer[self._used : end].view(dtype)

    def advance(self, nbytes: int) -> None:
        """Appends this many bytes of the space that ``space`` returned last."""
        self._used += nbytes
        if self._used == BUFFER_BYTES:
            self._flush()

    def append(self, data: bytes) -> None:
        """Appends some bytes."""
        self._flush_through_cache()
        self._write(memoryview(data))

    def _flush(self) -> None:
        data, self._used = self._buffer[: self._used].data, 0
        self._write(data)

    def _flush_through_cache(self) -> None:
        if self._direct:
            self._leave_direct()
        self._flush()

    def _leave_direct(self) -> None:
        self._direct = False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                # A file system may accept the flag and refuse the write. On an almost full disk, a partial
                # write leaves the rest unaligned.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes the rest, unless there was an error, and closes the file without fsync."""
        try:
            if kind is None:
                self._flush_through_cache()
                if hasattr(os, "posix_fadvise"):
                    # Linux starts to write the pages back without waiting, which leaves less for the fsync at
                    # the end; dirty pages stay in the page cache.
                    os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(self._descriptor)
