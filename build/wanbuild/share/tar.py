"""Writes files as an uncompressed tar archive whose bytes depend only on their names and content."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

COPY_BYTES = 2**20
"""Bytes read at a time."""


class _Digesting(io.RawIOBase):
    """A stream that passes on what is written, and computes its sha256."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance
        self.digest, self.size = hashlib.sha256(), 0

    def tell(self) -> int:
        return self.size

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)
        self._advance(len(data))
        return len(data)


def write_tar(
    file: BinaryIO, content: Mapping[str, Path | bytes], advance: Callable[[int], None]
) -> tuple[str, int]:
    """Writes an archive; returns its sha256, in hexadecimal, and its size in bytes.

    Files and the folders above them are in the order of their names. Owners, times and permissions are always
    the same: root, 1970, and readable for everybody. ``content`` has the files, or their bytes, by path;
    ``advance`` gets the number of bytes after each write. Raises OSError if a file cannot be read or becomes
    shorter meanwhile, or if there is no room.
    """
    out = _Digesting(file, advance)
    folders = {str(parent) for name in content for parent in PurePosixPath(name).parents} - {"."}
    with tarfile.TarFile(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, copybufsize=COPY_BYTES) as archive:
        for name in sorted((*folders, *content)):
            entry = tarfile.TarInfo(name)
            if name in folders:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            data = content[name]
            entry.mode = 0o644
            entry.size = len(data) if isinstance(data, bytes) else data.stat().st_size
            with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source:
                archive.addfile(entry, source)
    return out.digest.hexdigest(), out.size
