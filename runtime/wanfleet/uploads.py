"""Stores results in a folder, or an object store by fsspec. A file appears whole, and only once."""

from __future__ import annotations

__all__ = ["VideoStore"]

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import wanrun
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, WanError, unwritable

SCHEMES: Final = ("gs", "s3")
"""fsspec's schemes that every process sees: ``memory://`` ends with its process."""

_BEGUN: Final = re.compile(rf"\w+://|(?:file|{'|'.join(SCHEMES)}):/")
_URL: Final = re.compile(r"file:///+[^/]|(?!file:)\w+://[^/]")
"""A URL, of what begins like one."""

_FIRST: Final = "0001.png"
"""The picture that is put last into a folder of pictures: with it the folder is whole."""
Check = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
MAX_BYTES: Final = 2**22
"""The limit of small files that are read again."""


class StoreError(UsageError):
    """An object store gives no answer, or refuses; a later try may succeed (exit 1)."""

    exit_code = 1


class Uploads:
    """A place for results: a folder, which is made if it is missing, or a URL.

    The constructor raises UsageError if it cannot be written, or the URL is not understood.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        told = os.fspath(place)
        if _BEGUN.match(told) and _URL.match(told) is None:
            raise UsageError(
                "invalid_value",
                f"{told} names no folder",
                expected="s3://BUCKET, gs://BUCKET or file:///FOLDER",
            )
        self._place = told.rstrip("/")
        scheme = self._place.partition("://")[0] if "://" in self._place else ""
        self._files: Any = None
        if scheme not in ("", "file"):
            self._files = _file_system(scheme, self._place)
            return
        try:
            self._here("").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(f"the folder {self._place}", error, "choose another") from error

    def where(self, name: str) -> str:
        """Returns the path or URL of a file."""
        return f"{self._place}/{name}"

    def _here(self, name: str) -> Path:
        """Returns the path of a file in a folder."""
        return Path(self._place.removeprefix("file://"), name)

    def read(self, name: str) -> bytes | None:
        """Returns a small file's bytes; None if there is no such file.

        Raises UsageError if it cannot be read, for example without credentials, or has more than
        ``MAX_BYTES``.
        """
        where = self.where(name)
        try:
            if self._files is None:
                return wanrun.read_bounded(self._here(name), MAX_BYTES)
            data = bytes(self._files.cat_file(where, start=0, end=MAX_BYTES + 1))
        except FileNotFoundError:
            return None
        except Exception as error:  # each object store's packages have their own
            raise self._failed(where, "read", error) from error
        if len(data) > MAX_BYTES:
            raise UsageError(
                "unreadable", f"{where} cannot be read", found=f"it is larger than {MAX_BYTES} bytes"
            )
        return data

    def put(self, path: Path, name: str, overwrite: bool = False) -> bool:
        """Uploads a file; returns False if the name exists, unless ``overwrite`` replaces it.

        Raises UsageError if there is no room, or it may not be written.
        """
        try:
            if self._files is None:
                return self._copied(path, self._here(name), overwrite)
            if not overwrite and self._files.exists(self.where(name)):
                return False
            self._files.put_file(str(path), self.where(name))
        except Exception as error:  # each object store's packages have their own
            raise self._failed(self.where(name), "written", error) from error
        return True

    def has(self, name: str, whole: bool = True) -> bool:
        """Returns whether a video, a file or a folder of pictures, exists; UsageError if that is unknown.

        With ``whole`` a folder counts only if it has the picture that is put into it last.
        """
        if whole and name.lower().endswith(".frames"):
            name = f"{name}/{_FIRST}"
        try:
            if self._files is None:
                return os.path.lexists(self._here(name))
            return bool(self._files.exists(self.where(name)))
        except Exception as error:  # each object store's packages have their own
            raise self._failed(self.where(name), "read", error) from error

    def put_video(self, video: Path, overwrite: bool = False) -> bool:
        """Uploads a video, a file or a folder of pictures, under its own name, as ``put``.

        Returns whether it was copied; of a folder, whether the picture was that makes it whole.
        """
        files = sorted(video.iterdir(), reverse=True) if video.is_dir() else [video]
        return [self.put(file, str(file.relative_to(video.parent)), overwrite) for file in files][-1]

    def begin(
        self, record: Path, name: str, videos: Iterable[str], is_there: Callable[[], bool]
    ) -> str | None:
        """Uploads a record before its videos, unless the same one exists.

        ``is_there`` returns whether a record exists, and raises an error if it is another one. Returns a
        video that exists without a record, and so is not of a run: then nothing was uploaded. Else None.
        """
        if is_there():
            return None
        foreign = next((video for video in videos if self.has(video, whole=False)), None)
        if foreign is None and not self.put(record, name):
            is_there()  # that of another process, which came first
        return foreign

    def remove(self, name: str) -> None:
        """Removes a file or a folder, if it exists; raises UsageError if it may not be removed."""
        try:
            if self._files is not None:
                for file in self._files.find(self.where(name)):  # its rm takes a name for a pattern
                    self._files.rm_file(file)
            elif self._here(name).is_dir():
                shutil.rmtree(self._here(name))
            else:
                self._here(name).unlink()
        except FileNotFoundError:
            pass
        except Exception as error:  # each object store's packages have their own
            raise self._failed(self.where(name), "removed", error) from error

    def _failed(self, where: str, done: str, error: Exception) -> UsageError:
        """Returns the error of a failure of a folder or a store."""
        if self._files is None and isinstance(error, OSError) and done == "written":
            return unwritable(where, error)
        lasts = self._files is None or isinstance(error, FileNotFoundError | PermissionError)
        code: ErrorCode = "unreachable" if not lasts else "unreadable" if done == "read" else "unwritable"
        return (UsageError if lasts else StoreError)(
            code, f"{where} cannot be {done}", found=str(error)[:200]
        )

    @staticmethod
    def _copied(path: Path, final: Path, overwrite: bool) -> bool:
        """Copies a file under a temporary name in its folder, which is created, and then names it."""
        final.parent.mkdir(exist_ok=True)
        with wanrun.temporary_path(final) as copy:
            with path.open("rb") as source, copy.open("xb") as file:
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                copy.replace(final)
                return True
            try:
                final.hardlink_to(copy)
            except FileExistsError:
                return False
        return True


class VideoStore(Uploads):
    """The videos of a run of ``wanrun``, which are made in a local folder and then put into an object store.

    The folder exists while the store is entered; a video that could not be delivered stays in it.
    Next to each video is a record of how it was made, which is stored first: a video without one is not of
    a run. A record is never changed; to replace a video, its record is removed before, and put after it.

    Attributes:
        pattern: the local path, with the fields of the URL's name.

    Args:
        url: the videos' URL; its last part may have fields.
        kept: whether videos also stay in the local folder until the store is left.

    Raises:
        UsageError: as ``Uploads``, or if a folder has fields.
    """

    def __init__(self, url: str, kept: bool = False) -> None:
        place, _, name = url.rpartition("/")
        if "{" in place:
            raise UsageError(
                "invalid_value",
                f"the folder {place} has a field",
                expected="fields only in the file's name",
            )
        super().__init__(f"{place}/")
        self._kept, self._delivered = kept, list[Path]()
        self._folder = Path(tempfile.gettempdir()) / f"wanrun-videos-{secrets.token_hex(8)}"
        self.pattern = self.file(name)

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        with contextlib.suppress(OSError):  # a video that was not delivered is in it
            self._folder.rmdir()

    def file(self, name: str) -> str:
        """Returns the local path for a video of this name, which may have fields.

        Raises:
            UsageError: for a name with a folder.
        """
        if "/" in name or not name:
            raise UsageError(
                "invalid_value", f"{name!r} is no name of a video", expected="a name without a folder"
            )
        return str(self._folder / name)

    @contextlib.contextmanager
    def naming(self, errors: dict[int, WanError]) -> Iterator[None]:
        """Names the URL in the block's errors, raised or recorded: users do not know the local folder."""
        try:
            yield
        except WanError as error:
            raise self._named(error) from error
        errors.update({index: self._named(error) for index, error in errors.items()})

    def _named(self, error: WanError) -> WanError:
        here, there = f"{self._folder}/", self.where("")
        parts: dict[str, Any] = {
            name: part if part is None else str(part).replace(here, there)
            for name, part in error.parts.items()
        }
        return type(error)(**parts)

    def record(self, name: str) -> dict[str, Any] | None:
        """Returns how a video was made, or was to be, empty if unknown; None if there is no record.

        Raises:
            UsageError: if it cannot be read.
        """
        data = self.read(f"{name}.json")
        try:
            return None if data is None else dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return {}

    def deliver(self, video: Path, facts: Mapping[str, Any], overwrite: bool, check: Check) -> None:
        """Stores a video, unless another process has made the same one meanwhile; removes the local one.

        Args:
            video: the file, or the folder of pictures.
            facts: how it was made.
            overwrite: whether an existing one is replaced.
            check: compares the facts of an existing one with these, and raises UsageError if they differ.

        Raises:
            UsageError: if it cannot be written, or another video exists; then the local one stays.
        """
        record = video.with_name(f"{video.name}.json")
        try:
            record.write_text(json.dumps(facts, sort_keys=True, default=str))
            if overwrite:
                self.remove(record.name)
                if video.is_dir():  # it may have other pictures
                    self.remove(video.name)
                self.put_video(video, overwrite=True)
                self.put(record, record.name, overwrite=True)
            else:
                self._begin(video.name, record, facts, check)
                self.put_video(video)
        except (UsageError, OSError) as raised:
            error = raised if isinstance(raised, UsageError) else unwritable(str(record), raised)
            kept = f"the video is {video}" + (f"; {error.remedy}" if error.remedy else "")
            raise type(error)(**{**error.parts, "remedy": kept}) from raised
        self._delivered += [video, record]
        if not self._kept:
            self._remove()

    def _begin(self, name: str, record: Path, facts: Mapping[str, Any], check: Check) -> None:
        """Stores the record of a video; see ``begin``."""

        def is_there() -> bool:
            there = self.record(name)
            if there is not None:
                check(there, facts)
            return there is not None

        if self.begin(record, record.name, [name], is_there) is not None:
            raise UsageError("exists", f"{self.where(name)} appeared while the video was made")

    def _remove(self) -> None:
        """Removes what was delivered."""
        while self._delivered:
            path = self._delivered.pop()
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _file_system(scheme: str, place: str) -> Any:
    """Returns fsspec's file system for a URL."""
    if scheme not in SCHEMES:
        raise UsageError(
            "unsupported",
            f"results cannot be written to {place}",
            expected="a folder, file://, gs:// or s3://",
        )
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False)  # others write there too
    except ImportError as error:
        packages = {"s3": "s3fs", "gs": "gcsfs"}
        remedy = f"pip install {packages[scheme]}" if scheme in packages else "pip install '.[hub]'"
        raise UsageError(
            "unwritable", f"results cannot be written to {place}", found=str(error)[:200], remedy=remedy
        ) from None
