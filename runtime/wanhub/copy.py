"""Partial copies: folders of an artifact that is elsewhere, whose files are fetched when they are read.

A copy has the artifact's manifest, byte for byte, and ``MARKER``, which says where the rest is. Whoever
opens a file of it that is missing gets it by ``fetch``. So a run has what it reads and nothing else, and its
threads fetch beside its other work. Copies of several revisions share the components that are equal.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

import wanrun
from wanhub.address import Address, parse_address
from wanhub.atomic import write_atomic
from wanhub.reading import Report
from wanhub.signature import MANIFEST, SIGNATURE
from wanhub.store import Store, quiet
from wanrun.errors import ArtifactError, unwritable

MARKER: Final = ".partial-copy.json"
OWN: Final = frozenset({MARKER, MANIFEST, SIGNATURE})
"""Files that a copy has beside those of its manifest."""

RANGE_BYTES: Final = 2**23
"""Asked for at a time. What came stays if the connection or the process ends."""

MAX_MARKER_BYTES: Final = 2**16

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


def read_copied(folder: Path, where: str, remedy: str, origin: str = "") -> wanrun.Artifact:
    """Reads the manifest of an artifact that comes from elsewhere.

    Args:
        folder: where it is now.
        where: what a message names in the place of the folder.
        remedy: what to do if it is none: to build it again is for somebody else.
        origin: the address that it comes from.

    Raises:
        ArtifactError: as ``wanrun.open_artifact``.
    """
    try:
        if not (folder / MANIFEST).exists():  # whoever opens it would ask for it here
            raise ArtifactError(f"{folder} is not an artifact", found=f"no {MANIFEST}")
        return wanrun.open_artifact(folder, origin)
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
        self.artifact = read_copied(folder, f"the copy {folder}", remedy, self.address.text)
        self.named: Mapping[str, wanrun.Named] = named_files(self.artifact)
        self.store = Store(self.address, report)
        self._rows: dict[str, list[bytes]] = {}

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
        named, path = self.named.get(name), self.folder / name
        if named is None:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            with part.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if path.exists():  # another has fetched it meanwhile
                    part.unlink(missing_ok=True)
                    return True
                self._fill(file, named, advance)
                file.flush()
                try:
                    self._check(part, named)
                except ArtifactError:
                    file.truncate(0)
                    raise
                part.replace(path)
        except OSError as error:
            remedy = "set XDG_CACHE_HOME to another folder, or pull it into one (wanbuild pull -o)"
            raise unwritable(f"the copy {self.folder}", error, remedy) from error
        if named.parameter is not None:
            self._check_parameter(named)
        return True

    def discard_damaged(self, group: Sequence[wanrun.Named]) -> None:
        """Removes files that are not those of the manifest, so that they can be fetched again.

        Args:
            group: as of ``wanrun.groups``.
        """
        there, rows = list[wanrun.Named](), list[list[bytes]]()
        for one in group:
            if (path := self.folder / one.name).is_file():
                try:
                    rows.append(one.check(path))
                    there.append(one)
                except ArtifactError:
                    path.unlink(missing_ok=True)
        if there and there[0].parameter is not None and len(there) == len(group):
            with suppress(ArtifactError):
                self._check_rows(there, rows)

    def _fill(self, file: BinaryIO, named: wanrun.Named, advance: Progress) -> None:
        """Appends what is missing of a file, range by range."""
        done = os.fstat(file.fileno()).st_size
        if done > named.most:
            file.truncate(0)
            done = 0
        advance(done)
        while done < named.most:
            wanted = min(RANGE_BYTES, named.most - done)
            try:
                data = self.store.read(named.name, done, done + wanted)
            except FileNotFoundError:
                raise ArtifactError(
                    f"{named.name} is not at {self.address.text}",
                    expected="all files of its manifest",
                    remedy="it may have been replaced: run wanbuild pull, or ask who published it",
                ) from None
            file.write(data)
            done += len(data)
            advance(len(data))
            if len(data) < wanted:
                break

    def _check(self, part: Path, named: wanrun.Named) -> None:
        """Checks a file; remembers the digests of its rows for ``_check_parameter``."""
        try:
            self._rows[named.name] = named.check(part, f"{named.name} of {self.address.text}")
        except ArtifactError as error:
            raise _not_here(error) from None

    def _check_parameter(self, named: wanrun.Named) -> None:
        """Checks the digest of a parameter whose files are all there."""
        group = [one for one in self.named.values() if one.group == named.group]
        if not all((self.folder / one.name).exists() for one in group):
            return
        known = [self._rows.pop(one.name, None) for one in group]
        self._check_rows(
            group,
            [
                one.check(self.folder / one.name) if rows is None else rows
                for one, rows in zip(group, known, strict=True)
            ],
        )

    def _check_rows(self, group: Sequence[wanrun.Named], rows: Sequence[list[bytes]]) -> None:
        """Checks a parameter; removes its files if it is wrong."""
        try:
            group[0].check_rows(rows, f"{group[0].group} of {self.address.text}")
        except ArtifactError as error:
            for one in group:
                with suppress(OSError):
                    (self.folder / one.name).unlink()
            raise _not_here(error) from None


def _not_here(error: ArtifactError) -> ArtifactError:
    """Returns the error of a file that was damaged where it comes from."""
    return ArtifactError(**{**error.parts, "remedy": "try again; if it stays so, ask who made it"})


def named_files(artifact: wanrun.Artifact) -> Mapping[str, wanrun.Named]:
    """Returns every file of an artifact by its path.

    Raises:
        ArtifactError: if a file lies among weights, which copies share, or has the name of a copy's own.
    """
    files = {one.name: one for one in artifact.named()}
    folders = [f"{component.folder}/" for component in artifact.manifest.components.values()]
    others = [f"{name}/" for name, one in files.items() if one.parameter is None]
    for before, name in itertools.pairwise(sorted([*others, *folders])):
        if before in folders and name.startswith(before):
            raise _foreign(name, f"in the weights' folder {before}")
    if own := OWN & files.keys():
        raise _foreign(min(own), "the name of a file of every copy")
    return files


def _foreign(name: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"{name.rstrip('/')} cannot be a file of the artifact",
        expected="folders of weights with nothing else in them",
        found=found,
        remedy="do not use this artifact",
    )


@cache
def opened_copy(folder: Path, report: Report) -> PartialCopy:
    """Returns the partial copy in a folder, opened once per process; errors are those of ``PartialCopy``."""
    return PartialCopy(folder, report)


def fetch(folder: Path, name: str, report: Report = quiet) -> bool:
    """Fetches a file of the partial copy in a folder: see ``PartialCopy.fetch``."""
    return opened_copy(folder, report).fetch(name)
