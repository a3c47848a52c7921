"""The files of a live video: its head and each fragment until it has ended, then one file of those kept.

A file is whole or not there, so what a killed process has left plays too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from msgspec import Struct

import wanrun
from wanrun.temporary import remove_tree

FOLDER: Final = "live"
_NAME = re.compile(r"([0-9]{8})-([0-9]+)-([0-9]+)\.m4s")


class Piece(Struct, frozen=True):
    """A fragment: its number, the number of its first frame in the video, and its frames."""

    number: int
    first: int
    frames: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.number:08}-{self.first}-{self.frames}.m4s"


class LiveFiles:
    """The files of a live video; ``whole`` is the one that is there at the end."""

    def __init__(self, whole: Path) -> None:
        self._whole, self._folder = whole, whole.parent / FOLDER
        self._head = self._folder / "head.mp4"

    def begin(self, head: bytes) -> None:
        """Writes the head, which every reader gets before fragments."""
        self._folder.mkdir(exist_ok=True)
        _write(self._head, head)

    def add(self, piece: Piece, data: bytes) -> None:
        """Writes a fragment."""
        _write(self._folder / piece.name, data)

    def drop(self, piece: Piece) -> None:
        """Removes a fragment."""
        (self._folder / piece.name).unlink(missing_ok=True)

    def head(self) -> bytes:
        """Returns the head, also after the end. Raises OSError if the video was removed."""
        try:
            return self._head.read_bytes()
        except FileNotFoundError:
            return _part(self._whole, 0, self._fragments_at())

    def read(self, piece: Piece) -> bytes:
        """Returns a fragment. Raises FileNotFoundError if it is no separate file any more."""
        return (self._folder / piece.name).read_bytes()

    def part(self, before: int, nbytes: int) -> bytes:
        """Returns a fragment of the one file: ``nbytes`` after those of the fragments kept before it.

        Raises OSError if the video was removed.
        """
        return _part(self._whole, self._fragments_at() + before, nbytes)

    def _fragments_at(self) -> int:
        """Where the first fragment begins in the whole file: after two boxes, the head."""
        at = 0
        with self._whole.open("rb") as file:
            for _ in range(2):
                file.seek(at)
                at += int.from_bytes(file.read(4))
        return at

    @property
    def pieces(self) -> list[Piece]:
        """The fragments that are separate files."""
        if not self._folder.is_dir():
            return []
        names = (_NAME.fullmatch(file.name) for file in self._folder.iterdir())
        return sorted((Piece(*map(int, name.groups())) for name in names if name), key=lambda one: one.number)

    def join(self, frames: int) -> None:
        """Makes one file of the fragments that are kept, unless there is one. They stay until ``clear``.

        Fragments after the video's ``frames`` are left out: no reader has heard of them.
        """
        pieces = [one for one in self.pieces if one.first < frames]
        if not pieces or self._whole.exists():
            return
        with wanrun.temporary_path(self._whole) as temporary:
            with temporary.open("wb") as file:
                for part in (self._head, *(self._folder / piece.name for piece in pieces)):
                    file.write(part.read_bytes())
            temporary.replace(self._whole)

    def clear(self) -> bool:
        """Removes the fragments if they are one file; returns False if they are none yet."""
        if self._folder.is_dir() and (self._whole.exists() or not self.pieces):
            remove_tree(self._folder)
        return not self._folder.is_dir()


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _part(path: Path, start: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(nbytes)
