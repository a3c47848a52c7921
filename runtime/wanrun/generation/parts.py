"""The frames of a video that is made in parts: in memory, or in a folder from which an ended run goes on."""

from __future__ import annotations

__all__ = ["remove_spool", "spool_for", "spool_of"]

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.errors import UsageError, unwritable
from wanrun.files import canonical_json, read_bounded, replace_file, sha256_of
from wanrun.request.generation import Generation, deciding_facts

_STATE, _FRAMES, _LATENTS = "parts.json", "frames", "latents.npy"
_MAX_STATE_BYTES = 2**24
_PIECE_BYTES = 2**24
"""Of the frames of a folder, what is read at once."""


def spool_for(
    generation: Generation, folder: Path, metadata: Mapping[str, Any], overwrite: bool = False
) -> Spool:
    """Returns the parts of a generation in a folder, with those that are there.

    Args:
        generation: the generation.
        folder: their folder.
        metadata: of its videos: parts whose video had other metadata are another video's.
        overwrite: whether those are replaced.

    Raises:
        UsageError: for parts of another video, and for a folder that cannot be read.
    """
    deciding = {name: value for name, value in deciding_facts(metadata).items() if name != "latents"}
    profile = generation.profile
    return Spool(folder, sha256_of(canonical_json(deciding)), (profile.height, profile.width), overwrite)


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
    """The frames of the parts so far, in memory.

    Attributes:
        count: the parts that are there.
        latents: the final latents of the last one, float32 (B, C, T, h, w); empty if there is none.
    """

    def __init__(self) -> None:
        self.count, self.latents = 0, np.empty(0, np.float32)
        self._frames: list[np.ndarray] = []

    def add(self, frames: np.ndarray, latents: np.ndarray) -> None:
        """Adds a part: its own frames, uint8 (B, F, H, W, 3), and its final latents."""
        self._frames.append(frames)
        self.count, self.latents = self.count + 1, latents

    @property
    def last(self) -> np.ndarray:
        """The last frame, uint8 (B, 1, H, W, 3)."""
        return self._frames[-1][:, -1:]

    @property
    def frames(self) -> np.ndarray:
        """All frames, uint8 (B, F, H, W, 3)."""
        return self._frames[0] if self.count == 1 else np.concatenate(self._frames, axis=1)


class Spool(Parts):
    """The parts of one video in a folder, where a later run finds them; arrays of it are mapped files.

    Each part is on the disk before the record that counts it, with the checksum of its frames.

    Args:
        folder: the folder; it is made with the first part.
        key: what decides the video.
        size: height and width of the frames, in pixels.
        overwrite: whether the parts of another video are replaced.

    Raises:
        UsageError: for parts of another video, and for a folder that cannot be read.
    """

    def __init__(self, folder: Path, key: str, size: tuple[int, int], overwrite: bool = False) -> None:
        super().__init__()
        self._folder, self._key, self._size, self._checksums = folder, key, size, list[list[int]]()
        try:
            self._checksums = self._found()
            self.count = len(self._checksums)
            if self.count:
                self.latents = np.load(folder / _LATENTS, allow_pickle=False)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
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
    def _num_frames(self) -> int:
        return sum(frames for frames, _ in self._checksums)

    def add(self, frames: np.ndarray, latents: np.ndarray) -> None:
        """Adds a part, as ``Parts.add``; the frames are of one video.

        Raises:
            UsageError: if it cannot be written; NoSpaceError if the disk is full.
        """
        (own,) = frames
        data = np.ascontiguousarray(own)
        try:
            self._folder.mkdir(exist_ok=True)
            with (self._folder / _FRAMES).open("ab") as file:
                file.truncate(self._num_frames * self._frame_bytes)
                file.write(data.data.cast("B"))
                file.flush()
                os.fsync(file.fileno())
            with (self._folder / _LATENTS).open("wb") as file:
                np.lib.format.write_array(file, latents, allow_pickle=False)
            parts = [*self._checksums, [len(own), zlib.crc32(data.data.cast("B"))]]
            replace_file(self._folder / _STATE, canonical_json({"key": self._key, "parts": parts}))
        except OSError as error:
            raise unwritable(f"the parts in {self._folder}", error, "choose another --output") from error
        self._checksums, self.count, self.latents = parts, self.count + 1, latents

    @property
    def last(self) -> np.ndarray:
        return np.array(self.frames[:, -1:])

    @property
    def frames(self) -> np.ndarray:
        shape = (1, self._num_frames, *self._size, 3)
        return np.memmap(self._folder / _FRAMES, np.uint8, "r", shape=shape)


def _checksum_of(read: Any, size: int) -> int:
    """Returns the checksum of the next bytes of a file, read piece by piece."""
    pieces = (read(min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES))
    return reduce(lambda checksum, piece: zlib.crc32(piece, checksum), pieces, 0)
