"""Where results go: a folder, or an object store by fsspec. A file appears whole, and only once."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from wanrun.errors import UsageError, unwritable

SCHEMES: Final = ("gs", "s3", "file", "memory")
MAX_BYTES: Final = 2**22
"""Of the small files that are read again."""


class Outbox:
    """A place for results.

    Args:
        place: a folder, which is made if it is not there, or a URL.

    Raises:
        UsageError: if it cannot be written, or is a URL that is not understood.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self._place = os.fspath(place).rstrip("/")
        scheme = self._place.partition("://")[0] if "://" in self._place else ""
        self._files: Any = None
        if scheme:
            self._files = _file_system(scheme, self._place)
            return
        try:
            Path(self._place).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(f"the folder {self._place}", error, "choose another") from error

    def where(self, name: str) -> str:
        """Returns the path or URL of a file."""
        return f"{self._place}/{name}"

    def read(self, name: str) -> bytes | None:
        """Returns a small file's bytes; None if there is no such file."""
        try:
            if self._files is None:
                with Path(self.where(name)).open("rb") as file:
                    return file.read(MAX_BYTES)
            return bytes(self._files.cat_file(self.where(name))[:MAX_BYTES])
        except FileNotFoundError:
            return None

    def put(self, path: Path, name: str) -> bool:
        """Copies a file there unless one of this name is there; returns whether it was not.

        Raises:
            UsageError: if there is no room, or it may not be written.
        """
        try:
            if self._files is not None:
                if self._files.exists(self.where(name)):
                    return False
                self._files.put_file(str(path), self.where(name))
                return True
            return self._linked(path, Path(self.where(name)))
        except OSError as error:
            raise unwritable(self.where(name), error) from error

    @staticmethod
    def _linked(path: Path, final: Path) -> bool:
        """Copies beside the final name, and then gives it that name, which fails if there is one."""
        descriptor, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}-")
        try:
            with open(descriptor, "wb") as file, path.open("rb") as source:  # noqa: PTH123 - a descriptor
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            os.link(name, final)
        except FileExistsError:
            return False
        finally:
            Path(name).unlink(missing_ok=True)
        return True


def _file_system(scheme: str, place: str) -> Any:
    """Returns fsspec's file system for a URL."""
    if scheme not in SCHEMES:
        raise UsageError(
            f"results cannot be written to {place}",
            expected="a folder, or " + ", ".join(f"{one}://" for one in SCHEMES[:3]),
        )
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError as error:
        packages = {"s3": "s3fs", "gs": "gcsfs"}
        remedy = f"pip install {packages[scheme]}" if scheme in packages else "pip install '.[hub]'"
        raise UsageError(
            f"results cannot be written to {place}", found=str(error)[:200], remedy=remedy
        ) from None
