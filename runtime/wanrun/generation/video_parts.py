"""The frames of a video that is made in parts: in memory, or in a folder from which an ended run goes on."""

from __future__ import annotations

__all__ = ["remove_spool", "seed_in", "spool_for", "spool_of"]

import contextlib
import fcntl
import io
import os
import zlib
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np

from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, unwritable
from wanrun.files import NPY_DAMAGE, canonical_json, open_regular, read_bounded, replace_file, sha256_of
from wanrun.generation.decoding import Clips, Take
from wanrun.request.generation import Generation, deciding_facts

_RECORD, _FRAMES, _LATENTS = "parts.json", "frames", "latents.npy"
_MAX_RECORD_BYTES = 2**24
_PIECE_BYTES = 2**24
"""Bytes of a folder's frames that are read at once."""


def spool_for(
    generation: Generation,
    folder: Path,
    metadata: Mapping[str, Any],
    take: Take | None = None,
    overwrite: bool = False,
) -> Spool:
    """Returns the parts of a generation in a folder.

    Args:
        generation: the generation.
        folder: their folder.
        metadata: of its videos: parts whose video had other metadata are another video's.
        take: as of ``VideoParts``.
        overwrite: whether those are replaced.
    """
    deciding = {name: value for name, value in deciding_facts(metadata).items() if name != "latents"}
    profile = generation.profile
    key, size = sha256_of(canonical_json(deciding)), (profile.height, profile.width)
    return Spool(folder, key, size, take, overwrite, seed=generation.options["seed"])


def remove_spool(folder: Path) -> None:
    """Removes the parts of a video that no run makes; frames that are mapped stay, and files of others."""
    with contextlib.suppress(OSError, UsageError):
        if _record_in(folder) is not None:
            with _locked(folder):
                _remove(folder)


def seed_in(folder: Path) -> int | None:
    """Returns the seed of the video whose parts are in a folder; None if there are none.

    Raises:
        UsageError: for files that are no parts.
    """
    record = _record_in(folder)
    return None if record is None else record.seed


def spool_of(video: Path) -> Path:
    """Returns the folder of a video's parts, next to the video."""
    return video.with_name(f"{video.name}.parts")


class VideoParts:
    """The frames of a video's parts, its windows or clips, in their order: passed on, or kept in memory.

    It is a ``Take`` of the part that is being made, and a context while parts are made. ``take`` gets the
    frames; None keeps them. ``count`` parts and ``num_frames`` frames of one video are there; ``latents`` are
    the final ones of the last part, float32 (B, C, T, h, w), empty if there is none.
    """

    def __init__(self, take: Take | None = None) -> None:
        self.count, self.num_frames, self.latents = 0, 0, np.empty(0, np.float32)
        self._clips, self._last = Clips(), np.empty(0, np.uint8)
        self._take: Take = take or self._clips

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def resume(self) -> None:
        """Passes on the frames that an earlier run has made: none, in memory."""

    def __call__(self, video: int, frames: np.ndarray) -> None:
        """Adds frames of a video, uint8 (N, H, W, 3)."""
        self._last = frames[-1:]
        self.num_frames += len(frames) if video == 0 else 0
        self._take(video, frames)

    def end(self, latents: np.ndarray) -> None:
        """Ends a part, of which these are the final latents."""
        self.count, self.latents = self.count + 1, latents

    @property
    def last(self) -> np.ndarray:
        """The last frame, uint8 (1, 1, H, W, 3)."""
        return self._last[None]

    def joined(self, profile: Profile) -> np.ndarray:
        """Returns all frames, uint8 (B, F, H, W, 3); F is 0 if they were passed on."""
        return self._clips.joined(self.latents, profile)


class _Record(msgspec.Struct, omit_defaults=True):
    """The record of the parts in a folder: the key of their video, and frames and checksum of each part."""

    key: str
    parts: list[tuple[int, int]]
    seed: int | None = None


class Spool(VideoParts):
    """The parts of one video in a folder, where a later run finds them; arrays of it are mapped files.

    Each part is on the disk before the record that counts it, with the checksum of its frames. While the
    context is entered no other run has the folder. Nothing is changed in one whose files have no record. The
    folder is made as the context is entered, and removed at its end if it has no part. ``key`` is what
    decides the video, ``size`` the height and width of its frames. ``take`` gets the frames too, and the
    result has none then; those of an earlier run come by ``resume``. ``overwrite`` replaces the parts of
    another video, or damaged ones.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        size: tuple[int, int],
        take: Take | None = None,
        overwrite: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(take or _nobody)
        self._mapped, self._part = take is None, (0, 0)
        self._file: BinaryIO = io.BytesIO()  # until the context is entered
        self._folder, self._size, self._overwrite = folder, size, overwrite
        self._record = _Record(key, [], seed)

    def there(self) -> int:
        """Returns how many parts are there; changes nothing.

        Raises UsageError for parts of another video, a folder that another run has or that has other files,
        and one that cannot be used.
        """
        if _record_in(self._folder) is not None:
            with self._usable(), _locked(self._folder):
                pass  # no longer, so that no run which begins now finds it taken
            self._find()
        return self.count

    def __enter__(self) -> Self:
        """Takes the folder, and finds the parts that are there; raises as ``there``."""
        with self._usable():
            found = _record_in(self._folder)
            self._folder.mkdir(exist_ok=True)
            self._file = _locked(self._folder)
            try:
                self._find()
                if found is None or not self.count:
                    self._begin()
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError), self._file:
            if not self.count:
                _remove(self._folder)

    def _begin(self) -> None:
        """Starts again with another file: results of earlier videos may have mapped the one that is there."""
        replace_file(self._folder / _RECORD, msgspec.json.encode(self._record))
        for name in (_FRAMES, _LATENTS):
            (self._folder / name).unlink(missing_ok=True)
        taken = self._file
        self._file = _locked(self._folder)
        taken.close()

    def _find(self) -> None:
        """Finds the parts that are there; raises UsageError for others, unless they are replaced."""
        found = _record_in(self._folder)
        if found is None or not found.parts or not (self._folder / _LATENTS).exists():
            return  # those without latents are what an ended removal has left
        if (wrong := self._wrong_in(found)) is None:
            self._record.parts, self.count = found.parts, len(found.parts)
            self.num_frames = self._written
        elif not self._overwrite:
            raise UsageError(
                "unsupported",
                f"the parts in {self._folder} cannot be continued",
                expected="those of the same video",
                found=wrong,
                remedy="pass --overwrite to begin anew, or choose another --output",
            )

    def _wrong_in(self, found: _Record) -> str | None:
        """Says why parts cannot be continued, or reads the latents of the last one."""
        if found.key != self._record.key:
            return "those of another one"
        try:
            with open_regular(self._folder / _FRAMES) as file:
                for frames, checksum in found.parts:
                    if _checksum_of(file.read, frames * self._frame_bytes) != checksum:
                        return "damaged frames"
            self.latents = np.load(self._folder / _LATENTS, allow_pickle=False)
        except OSError as error:
            return f"{Path(error.filename or self._folder).name}: {error.strerror}"
        except NPY_DAMAGE:
            return "damaged latents"
        return None

    @property
    def _frame_bytes(self) -> int:
        height, width = self._size
        return 3 * height * width

    @property
    def _written(self) -> int:
        return sum(frames for frames, _ in self._record.parts)

    def resume(self) -> None:
        if self._written:
            found, step = self._frames[0], max(1, _PIECE_BYTES // self._frame_bytes)
            self._last = np.array(found[-1:])
            for first in range(0, len(found), step):
                self._take(0, found[first : first + step])

    def __call__(self, video: int, frames: np.ndarray) -> None:
        """Adds frames of the only video, as ``VideoParts``; errors are those of ``end``."""
        super().__call__(video, frames)
        data, (there, checksum) = np.ascontiguousarray(frames).data.cast("B"), self._part
        with self._usable():
            if not there:  # what an ended run has left of the part
                self._file.truncate(self._written * self._frame_bytes)
            self._file.write(data)
        self._part = there + len(frames), zlib.crc32(data, checksum)

    def end(self, latents: np.ndarray) -> None:
        """Ends a part of one video, as ``VideoParts.end``.

        Raises UsageError if it cannot be written; NoSpaceError if the disk is full.
        """
        record = msgspec.structs.replace(self._record, parts=[*self._record.parts, self._part])
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, latents, allow_pickle=False)
        with self._usable():
            self._file.flush()
            os.fsync(self._file.fileno())
            replace_file(self._folder / _LATENTS, buffer.getvalue())
            replace_file(self._folder / _RECORD, msgspec.json.encode(record))
        self._record, self._part = record, (0, 0)
        super().end(latents)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Raises the error of a folder that cannot be written."""
        try:
            yield
        except OSError as error:
            raise unwritable(f"the parts in {self._folder}", error, "choose another --output") from error

    def joined(self, profile: Profile) -> np.ndarray:
        return self._frames if self._mapped else super().joined(profile)

    @property
    def _frames(self) -> np.ndarray:
        shape = (1, self._written, *self._size, 3)
        return np.memmap(self._folder / _FRAMES, np.uint8, "r", shape=shape)


def _nobody(video: int, frames: np.ndarray) -> None:
    pass


def _checksum_of(read: Any, size: int) -> int:
    """Returns the checksum of the next bytes of a file, read piece by piece."""
    pieces = (read(min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES))
    return reduce(lambda checksum, piece: zlib.crc32(piece, checksum), pieces, 0)


def _record_in(folder: Path) -> _Record | None:
    """Returns the record of a folder; None if parts replace nothing there, UsageError if files of others."""
    try:
        return msgspec.json.decode(read_bounded(folder / _RECORD, _MAX_RECORD_BYTES), type=_Record)
    except FileNotFoundError:
        names = [name for name in (_FRAMES, _LATENTS) if _nbytes(folder / name)]
        if not names:
            return None
        found = f"{names[0]} without {_RECORD}"
    except NotADirectoryError:
        found = "a file"
    except ValueError:  # also if it is not a file, or too large
        found = f"{_RECORD}, which is no record of parts"
    except OSError as error:
        found = f"{_RECORD}: {error.strerror}"
    raise UsageError(
        "exists",
        f"{folder} is where the parts of a video are kept while it is made",
        expected="nothing there, or parts of this video",
        found=found,
        remedy="move it away, or choose another --output",
    )


def _nbytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _locked(folder: Path) -> BinaryIO:
    """Opens the file of frames, which no other run has until it is closed; UsageError if one has it."""
    file = (folder / _FRAMES).open("ab")
    if not _taken(file):
        file.close()
        raise UsageError(
            "busy",
            f"another run makes the parts in {folder}",
            remedy="wait for its end, or choose another --output",
        )
    return file


def _taken(file: BinaryIO) -> bool:
    """Takes the lock of a file, unless another process has it, or has had it and removed the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return os.fstat(file.fileno()).st_nlink > 0


def _remove(folder: Path) -> None:
    """Removes parts: latents first, then frames and their record, by which what is left of it is known."""
    for name in (_LATENTS, _FRAMES, _RECORD):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()
