"""Writing files so that a reader finds the old content or the new, never a part of either."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tokenize
from pathlib import Path, PurePosixPath
from typing import Any

from wanrun.errors import ArtifactError

NPY_DAMAGE = (ValueError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
"""What NumPy raises for a damaged .npy file, whose header is Python source."""


def fsync_directory(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, data: bytes) -> None:
    """Writes a new file and fsyncs it; the folder's entry is the caller's to fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Writes data to path atomically and durably, through a temporary file beside it."""
    temporary = path.with_name(f".wan-{secrets.token_hex(6)}.tmp")
    try:
        write_durable(temporary, data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def read_bounded(path: Path, limit: int, touch: bool = False) -> bytes:
    """Reads a regular file of at most limit bytes.

    Args:
        path: the file.
        limit: bytes.
        touch: whether its time becomes now, so that it counts as used.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is something else, or larger.
    """
    # A FIFO of that name must not make the run wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a file")
        data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it is larger than {limit} bytes")
        if touch:
            with contextlib.suppress(OSError):  # of another user, or on a medium that cannot be written
                os.utime(descriptor)
        return data


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values: sorted keys, no white space, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_found(path: Path) -> str:
    """sha256 of a file, or why it cannot be read: what a message says that it found."""
    try:
        return file_sha256(path)
    except OSError as error:
        return error.strerror or str(error)


def check_digest(found: str, expected: str, what: str, remedy: str) -> None:
    """Raises ArtifactError(what) unless the sha256 that was found, or why there is none, is as expected."""
    if found != expected:
        raise ArtifactError(what, expected=f"sha256 {expected}", found=found, remedy=remedy)


def user_cache() -> Path:
    """This user's cache of what the runtime makes: $XDG_CACHE_HOME/wanrun, or ~/.cache/wanrun.

    Raises:
        RuntimeError: for a user without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wanrun"


def plain_relative(name: Any, where: str) -> str:
    """Returns name if it is a plain relative path: no root, drive, '..', empty part or odd character.

    Raises:
        ArtifactError: otherwise; a manifest must not reach outside its artifact.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    plain = (
        bool(parts)
        and "/".join(parts) == name
        and all(
            part not in (".", "..") and part.isprintable() and "\\" not in part and ":" not in part
            for part in parts
        )
    )
    if not plain or name.startswith("/"):
        raise ArtifactError(
            f"{where} names a path outside the artifact",
            expected="a plain relative path",
            found=repr(name),
            remedy="do not use this artifact",
        )
    return str(name)
