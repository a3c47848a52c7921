"""The frames of a video that is made in parts: in memory, or in a folder from which an ended run goes on."""

from __future__ import annotations

__all__ = ["remove_spool", "spool_for", "spool_of"]

import contextlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, unwritable
from wanrun.files import NPY_DAMAGE, canonical_json, read_bounded, replace_file, sha256_of
from wanrun.generation.decoding import Clips, Take
from wanrun.request.generation import Generation, deciding_facts

_STATE, _FRAMES, _LATENTS = "parts.json", "frames", "latents.npy"
_MAX_STATE_BYTES = 2**24
_PIECE_BYTES = 2**24
"""Of the frames of a folder, what is read at once."""


def spool_for(
    generation: Generation,
    folder: Path,
    metadata: Mapping[str, Any],
    take: Take | None = None,
    overwrite: bool = False,
) -> Spool:
    """Returns the parts of a generation in a folder, with those that are there.

    Args:
        generation: the generation.
        folder: their folder.
        metadata: of its videos: parts whose video had other metadata are another video's.
        take: as of ``Parts``.
        overwrite: whether those are replaced.

    Raises:
        UsageError: for parts of another video, and for a folder that cannot be read.
    """
    deciding = {name: value for name, value in deciding_facts(metadata).items() if name != "latents"}
    profile = generation.profile
    return Spool(
        folder, sha256_of(canonical_json(deciding)), (profile.height, profile.width), take, overwrite
    )


def remove_spool(folder: Path) -> None:
    """Removes the parts of a video, as far as it can; frames that are mapped stay."""
    with contextlib.suppress(OSError):
        for name in (_STATE, _LATENTS, _FRAMES):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def spool_of(video: Path) -> Path:
    """Returns the folder of a video's parts, beside the video."""
    return video.with_name(f"{video.name}.parts")


class Parts:
    """The frames of a video's parts, its windows or clips, in their order: passed on, or kept in memory.

    It is a ``Take`` of the part that is being made.

    Args:
        take: gets the frames; None to keep them.

    Attributes:
        count: the parts that are there.
        num_frames: the frames of one video that are there.
        latents: the final latents of the last part, float32 (B, C, T, h, w); empty if there is none.
    """

    def __init__(self, take: Take | None = None) -> None:
        self.count, self.num_frames, self.latents = 0, 0, np.empty(0, np.float32)
        self._clips, self._last = Clips(), np.empty(0, np.uint8)
        self._take: Take = take or self._clips

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


class Spool(Parts):
    """The parts of one video in a folder, where a later run finds them; arrays of it are mapped files.

    Each part is on the disk before the record that counts it, with the checksum of its frames.

    Args:
        folder: the folder; it is made with the first part.
        key: what decides the video.
        size: height and width of the frames, in pixels.
        take: gets the frames too, of which the result has none then; those that are there by ``resume``.
        overwrite: whether the parts of another video are replaced.

    Raises:
        UsageError: for parts of another video, and for a folder that cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        size: tuple[int, int],
        take: Take | None = None,
        overwrite: bool = False,
    ) -> None:
        super().__init__(take or _nobody)
        self._mapped, self._part = take is None, [0, 0]
        self._folder, self._key, self._size, self._checksums = folder, key, size, list[list[int]]()
        if folder.exists() and not folder.is_dir():
            raise UsageError(
                f"the parts in {folder} cannot be written",
                expected="a folder, or nothing there",
                found="a file",
                remedy="remove it, or choose another --output",
            )
        try:
            checksums = self._found()
            self.latents = np.load(folder / _LATENTS, allow_pickle=False)
            self._checksums = checksums
            self.count, self.num_frames = len(checksums), self._written
        except FileNotFoundError:
            pass
        except (OSError, LookupError, *NPY_DAMAGE) as error:
            if not overwrite:
                raise UsageError(
                    f"the parts in {folder} cannot be continued",
                    expected="those of the same video",
                    found=error,
                    remedy="pass --overwrite to begin anew, or choose another --output",
                ) from None

    def _found(self) -> list[list[int]]:
        """Returns the number of frames and the checksum of each part that is there and whole."""
        state = json.loads(read_bounded(self._folder / _STATE, _MAX_STATE_BYTES))
        if state["key"] != self._key:
            raise ValueError("those of another one")
        with (self._folder / _FRAMES).open("rb") as file:
            for frames, checksum in state["parts"]:
                if _checksum_of(file.read, frames * self._frame_bytes) != checksum:
                    raise ValueError("damaged frames")
        return [[int(frames), int(checksum)] for frames, checksum in state["parts"]]

    @property
    def _frame_bytes(self) -> int:
        height, width = self._size
        return 3 * height * width

    @property
    def _written(self) -> int:
        return sum(frames for frames, _ in self._checksums)

    def resume(self) -> None:
        if self._written:
            found, step = self._frames[0], max(1, _PIECE_BYTES // self._frame_bytes)
            self._last = np.array(found[-1:])
            for first in range(0, len(found), step):
                self._take(0, found[first : first + step])

    def __call__(self, video: int, frames: np.ndarray) -> None:
        """Adds frames of the only video, as ``Parts``; errors are those of ``end``."""
        super().__call__(video, frames)
        data, (there, checksum) = np.ascontiguousarray(frames).data.cast("B"), self._part
        with self._appending() as file:
            if not there:  # what an ended run has left of the part
                file.truncate(self._written * self._frame_bytes)
            file.write(data)
        self._part = [there + len(frames), zlib.crc32(data, checksum)]

    def end(self, latents: np.ndarray) -> None:
        """Ends a part of one video, as ``Parts.end``.

        Raises:
            UsageError: if it cannot be written; NoSpaceError if the disk is full.
        """
        parts, buffer = [*self._checksums, self._part], io.BytesIO()
        np.lib.format.write_array(buffer, latents, allow_pickle=False)
        with self._appending() as file:
            os.fsync(file.fileno())
            replace_file(self._folder / _LATENTS, buffer.getvalue())
            replace_file(self._folder / _STATE, canonical_json({"key": self._key, "parts": parts}))
        self._checksums, self._part = parts, [0, 0]
        super().end(latents)

    @contextlib.contextmanager
    def _appending(self) -> Iterator[BinaryIO]:
        """Opens the file of frames, which is made if it is not there; raises the error of the folder."""
        try:
            self._folder.mkdir(exist_ok=True)
            with (self._folder / _FRAMES).open("ab") as file:
                yield file
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
