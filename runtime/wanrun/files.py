"""Reads and writes files; a reader sees the old or the new content of a written file, never a part."""

from __future__ import annotations

__all__ = ["NPY_DAMAGE", "canonical_json", "fsync_directory", "write_durable"]

import contextlib
import errno
import functools
import hashlib
import json
import os
import stat
import tokenize
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

from wanrun.errors import ArtifactError
from wanrun.temporary import temporary_path

NPY_DAMAGE = (
    *(ValueError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError, ArithmeticError),
    tokenize.TokenError,
)
"""NumPy's exceptions for a damaged .npy file, whose header is Python source."""


def fsync_directory(path: Path) -> None:
    """Makes a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Writes a new file, of bytes or of parts that are made meanwhile, and fsyncs it.

    The caller must fsync the folder.
    """
    with open(path, "wb", opener=functools.partial(os.open, mode=mode)) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes data to path atomically and durably, through a temporary file in the same folder.

    ``mode`` says who may read it, less what the umask takes away.
    """
    with temporary_path(path) as temporary:
        write_durable(temporary, data, mode)
        temporary.replace(path)
    fsync_directory(path.parent)


class UnusableFileError(OSError, ValueError):
    """Not a regular file, or larger than such a file can be. Reading it again does not help."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """Opens a regular file for reading. A FIFO or a device could block the reader for ever.

    Raises OSError if it cannot be opened, is something else, or has more bytes than ``limit``.
    """

    def without_waiting(name: str, mode: int) -> int:
        # Opening a FIFO would wait for a writer without O_NONBLOCK. A regular file does not know the flag.
        return os.open(name, mode | os.O_NONBLOCK)

    # The file is the only owner of its descriptor. A signal may raise at any point, and a second close of the
    # descriptor would then raise instead.
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - returned
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFileError("it is not a file")
        if limit is not None and status.st_size > limit:
            raise UnusableFileError(f"it is larger than {limit} bytes")
    except BaseException:
        file.close()
        raise
    return file


def read_bounded(path: Path, limit: int, touch: bool = False) -> bytes:
    """Reads a regular file of at most ``limit`` bytes; ``touch`` sets its time to now, to mark it as used.

    Raises OSError if it cannot be read, is something else, or is larger.
    """
    with open_regular(path, limit) as file:
        data = file.read(limit)  # no more, if it grows meanwhile
        if touch:
            with contextlib.suppress(OSError):  # another user's file, or a read-only medium
                os.utime(file.fileno())
        return data


def canonical_json(value: Any) -> bytes:
    """Returns the same JSON for equal values: sorted keys, no white space, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SEAL_BYTES = hashlib.sha256().digest_size
"""By how much ``sealed`` is longer than the data."""


def sealed(name: str, data: bytes) -> bytes:
    """Returns the contents of a file of this name: the data, and a digest of both behind them."""
    return data + hashlib.sha256(name.encode() + b"\0" + data).digest()


def unsealed(name: str, content: bytes) -> bytes:
    """Returns the data of ``sealed``; raises ValueError if they are damaged, or of a file of another name."""
    data = content[:-SEAL_BYTES]
    if sealed(name, data) != content:
        raise ValueError("its digest is wrong")
    return data


def file_sha256(path: Path, most: int | None = None) -> str:
    with open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_found(path: Path, most: int) -> str:
    """Returns a file's sha256, or for a message the reason why it is not read.

    One of more than ``most`` bytes is not: a sparse file may have more than can be read in a day.
    """
    try:
        return file_sha256(path, most)
    except OSError as error:
        return error.strerror or str(error)


def check_digest(found: str, expected: str, what: str, remedy: str) -> None:
    """Raises ArtifactError(what) unless ``found``, a sha256 or the reason for its absence, is as expected."""
    if found != expected:
        raise ArtifactError("damaged", what, expected=f"sha256 {expected}", found=found, remedy=remedy)


def user_cache() -> Path:
    """Returns this user's cache folder: $XDG_CACHE_HOME/wanrun, or ~/.cache/wanrun.

    A container's user may be unknown to its system and have no home. Then it is a folder that no user can
    make, so that all is as with a home that cannot be written.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wanrun"
    except RuntimeError:
        return Path(os.devnull) / "wanrun"


def user_copies() -> Path:
    """Returns the folder of this user's copies of artifacts that are elsewhere."""
    return user_cache() / "artifacts"


def plain_relative(name: Any, where: str) -> str:
    """Returns name if it is a plain relative path: no root, drive, '..', empty part or special character.

    Raises ArtifactError otherwise: a manifest must not refer to files outside its artifact.
    """
    plain = isinstance(name, str) and all(
        part not in ("", ".", "..") and part.isprintable() and "\\" not in part and ":" not in part
        for part in name.split("/")
    )
    if not plain:
        raise ArtifactError(
            "untrusted",
            f"{where} names a path outside the artifact",
            expected="a plain relative path",
            found=repr(name),
            remedy="do not use this artifact",
        )
    return str(name)
