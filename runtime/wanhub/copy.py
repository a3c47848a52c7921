"""Partial copies: folders of an artifact that is elsewhere, whose files are fetched when they are read.

A copy has the artifact's manifest, byte for byte, and ``MARKER``, which says where the rest is. Whoever
opens a file of it that is missing gets it by ``fetch``. So a run has what it reads and nothing else, and its
threads fetch beside its other work. Copies of several revisions share the components that are equal.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

import wanrun
from wanhub.address import Address, parse_address
from wanhub.atomic import write_atomic
from wanhub.expected import Expected, check_file, check_parameter, expected_files
from wanhub.reading import Report
from wanhub.signature import MANIFEST
from wanhub.store import Store, quiet
from wanrun.errors import ArtifactError, unwritable

MARKER: Final = ".partial-copy.json"
RANGE_BYTES: Final = 2**23
"""Asked for at a time. What came stays if the connection or the process ends."""

MAX_MARKER_BYTES: Final = 2**16

MAX_BYTES: Final = 2**30
"""Of a file whose size the manifest does not say; the largest real one, a tokenizer, has 17 MB."""

Progress = Callable[[int], None]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a copy's files come from.

    Attributes:
        address: as it is told; of a repository at a commit.
        url: the URL with its query.
    """

    address: str
    url: str

    @property
    def place(self) -> Address:
        """What the store reads."""
        place = parse_address(self.address)
        return place if place.repository else parse_address(self.url)


def mark(folder: Path, origin: Origin) -> None:
    """Makes a folder a partial copy, or tells one another origin. Raises OSError if it cannot be written.

    What is not the address may be a key: then it is for the user's eyes alone.
    """
    marker, data = folder / MARKER, msgspec.json.encode(origin)
    if not marker.exists() or wanrun.read_bounded(marker, MAX_MARKER_BYTES) != data:
        write_atomic(marker, data, 0o644 if origin.url in origin.address else 0o600)
        opened_copy.cache_clear()


def read_copied(folder: Path, where: str, remedy: str) -> wanrun.Manifest:
    """Reads a manifest that comes from elsewhere.

    Args:
        folder: where it is now.
        where: what a message names in the place of the folder.
        remedy: what to do if it is none: to build it again is for somebody else.

    Raises:
        ArtifactError: as ``wanrun.read_manifest``.
    """
    try:
        if not (folder / MANIFEST).exists():  # whoever opens it would ask for it here
            raise ArtifactError(f"{folder} is not an artifact", found=f"no {MANIFEST}")
        return wanrun.read_manifest(folder)
    except ArtifactError as error:
        what = error.what.replace(str(folder / MANIFEST), f"{MANIFEST} of {where}")
        what = what.replace(str(folder), where)
        raise ArtifactError(what, expected=error.expected, found=error.found, remedy=remedy) from None


class PartialCopy:
    """A partial copy that is there. Its methods may be called by several threads and processes.

    Args:
        folder: it has ``MARKER`` and the manifest.
        report: gets a line about a wait, from any thread.

    Raises:
        ArtifactError: if its marker or its manifest is damaged.
        UsageError: as ``Store``.
    """

    def __init__(self, folder: Path, report: Report = quiet) -> None:
        self.folder, remedy = folder, f"remove {folder}, and fetch it again"
        try:
            origin = msgspec.json.decode(wanrun.read_bounded(folder / MARKER, MAX_MARKER_BYTES), type=Origin)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{folder / MARKER} is damaged", found=str(error)[:200], remedy=remedy
            ) from None
        self.address = origin.place
        self.manifest: wanrun.Manifest = read_copied(folder, f"the copy {folder}", remedy)
        self.expected = expected_files(self.manifest)
        self.store = Store(self.address, report)
        self._rows: dict[tuple[str, int], list[bytes]] = {}

    def fetch(self, name: str, advance: Progress = lambda _: None) -> bool:
        """Fetches a file if it is missing, and checks it; another that fetches it is waited for.

        Args:
            name: its path in the artifact.
            advance: gets the number of bytes after each range.

        Returns:
            Whether it is there now; False for a file that the artifact does not list.

        Raises:
            ArtifactError: if it is not where the manifest comes from, or is not the one that it lists.
            UsageError: if there is no room, or the folder cannot be written.
        """
        expected, path = self.expected.get(name), self.folder / name
        if expected is None:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            with part.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if path.exists():  # another has fetched it meanwhile
                    part.unlink(missing_ok=True)
                    return True
                self._fill(file, name, expected, advance)
                file.flush()
                try:
                    self._check(part, name, expected)
                except ArtifactError:
                    file.truncate(0)
                    raise
                part.replace(path)
        except OSError as error:
            remedy = "set XDG_CACHE_HOME to another folder, or pull it into one (wanbuild pull -o)"
            raise unwritable(f"the copy {self.folder}", error, remedy) from error
        if expected.parameter is not None:
            self._check_parameter(expected)
        return True

    def discard_damaged(self, group: Sequence[str]) -> None:
        """Removes files that are not those of the manifest, so that they can be fetched again.

        Args:
            group: all chunk files of a parameter, or one other file; see ``expected.together``.
        """
        there, rows = list[Path](), list[list[bytes]]()
        for path, name in ((self.folder / name, name) for name in group):
            try:
                if path.is_file():
                    rows.append(check_file(path, name, self.expected[name]))
                    there.append(path)
            except (ArtifactError, OSError):
                path.unlink(missing_ok=True)
        expected = self.expected[group[0]]
        if expected.parameter is not None and len(there) == len(expected.siblings):
            with suppress(ArtifactError):
                self._check_rows(there, expected, rows)

    def _fill(self, file: BinaryIO, name: str, expected: Expected, advance: Progress) -> None:
        """Appends what is missing of a file, range by range."""
        most = MAX_BYTES if expected.nbytes is None else expected.nbytes
        done = os.fstat(file.fileno()).st_size
        if done > most:
            file.truncate(0)
            done = 0
        advance(done)
        while done < most:
            wanted = min(RANGE_BYTES, most - done)
            try:
                data = self.store.read(name, done, done + wanted)
            except FileNotFoundError:
                raise ArtifactError(
                    f"{name} is not at {self.address.text}",
                    expected="all files of its manifest",
                    remedy="it may have been replaced: run wanbuild pull, or ask who published it",
                ) from None
            file.write(data)
            done += len(data)
            advance(len(data))
            if len(data) < wanted:
                break

    def _check(self, part: Path, name: str, expected: Expected) -> None:
        """Checks a file; remembers the digests of its rows for ``_check_parameter``."""
        rows = check_file(part, f"{name} of {self.address.text}", expected)
        if expected.parameter is not None:
            self._rows[expected.folder, expected.index] = rows

    def _check_parameter(self, expected: Expected) -> None:
        """Checks the digest of a parameter whose chunk files are all there."""
        files = [self.folder / name for name in expected.siblings]
        if not all(file.exists() for file in files):
            return
        self._check_rows(
            files, expected, [self._rows.pop((expected.folder, index), None) for index in range(len(files))]
        )

    def _check_rows(
        self, files: Sequence[Path], expected: Expected, rows: Sequence[list[bytes] | None]
    ) -> None:
        """Checks a parameter as ``check_parameter`` does; removes its files if it is wrong."""
        try:
            check_parameter(files, f"{expected.folder} of {self.address.text}", expected, rows)
        except ArtifactError:
            for file in files:
                with suppress(OSError):
                    file.unlink()
            raise


@cache
def opened_copy(folder: Path, report: Report) -> PartialCopy:
    """Returns the partial copy in a folder, opened once per process; errors are those of ``PartialCopy``."""
    return PartialCopy(folder, report)


def fetch(folder: Path, name: str, report: Report = quiet) -> bool:
    """Fetches a file of the partial copy in a folder: see ``PartialCopy.fetch``."""
    return opened_copy(folder, report).fetch(name)
