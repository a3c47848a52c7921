"""Copies: folders with an artifact's manifest, byte for byte, and those of its files that were fetched.

Copies of several revisions share the components that are equal.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import BinaryIO, Final

import wanrun
from wanhub.marker import MARKER
from wanhub.origin import read_origin
from wanhub.remote_files import RemoteFiles
from wanhub.signature import MANIFEST, SIGNATURE
from wanhub.url_reader import Report, quiet
from wanrun.errors import ArtifactError, unwritable

OWN: Final = frozenset({MARKER, MANIFEST, SIGNATURE})
"""Files that a copy has besides those that its manifest lists."""

RANGE_BYTES: Final = 2**23
"""Bytes of a request. What came stays if the connection or the process ends."""

THREADS: Final = 16
"""Requests at a time: most files are small, and each waits for the network."""

Progress = Callable[[int], None]


class Copy:
    """A copy, whose files can be fetched, also by several processes at once.

    The folder of ``artifact`` has a manifest and an origin. ``report`` gets a line about a wait, from any
    thread. The constructor raises ArtifactError if the folder is not a copy, or its marker is damaged.
    """

    def __init__(self, artifact: wanrun.Artifact, report: Report = quiet) -> None:
        if (origin := read_origin(artifact.folder)) is None:
            raise ArtifactError("wrong_kind", f"{artifact} is no copy", found=f"no {MARKER}")
        self.artifact, self._origin, self._report = artifact, origin, report

    @cached_property
    def store(self) -> RemoteFiles:
        """The place of its files. Raises UsageError as ``RemoteFiles``."""
        return RemoteFiles(self._origin.place, self._report)

    def missing(self, names: Iterable[wanrun.Named]) -> list[wanrun.Named]:
        """Returns the missing files, each once."""
        files = {one.name: one for one in names}
        return [one for one in files.values() if not self.artifact.path(one).is_file()]

    def discard_damaged(self, names: Iterable[wanrun.Named]) -> None:
        """Removes files that differ from the manifest, so that they can be fetched again."""
        files = {one.name: one for one in names}
        with ThreadPoolExecutor(thread_name_prefix="check") as pool:
            for one in [pool.submit(self._discard, group) for group in wanrun.groups(files.values())]:
                one.result()

    def fetch(self, names: Iterable[wanrun.Named], advance: Progress = lambda _: None) -> None:
        """Fetches missing files, several at a time, and checks them.

        ``names`` has all files of a parameter or none. ``advance`` gets numbers of bytes as they come, from
        any thread. Raises ArtifactError if a file is missing where the manifest comes from, or differs from
        it; the other fetched files stay. Raises UsageError if there is no room, or the folder cannot be
        written; and as ``RemoteFiles``.
        """
        self.store  # noqa: B018 - one for all threads
        wanted = {one.name: one for one in names}
        incomplete = {one.group for one in self.missing(wanted.values())}
        groups = [group for group in wanrun.groups(wanted.values()) if group[0].group in incomplete]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="fetch") as pool:
            coming = [[pool.submit(self._fetched, one, advance) for one in group] for group in groups]
            try:
                for group, files in zip(groups, coming, strict=True):
                    self._check_rows(group, [one.result() for one in files])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetched(self, named: wanrun.Named, advance: Progress) -> list[bytes] | None:
        """Fetches a missing file, or waits for who does; returns its rows' digests, None if it is there."""
        if (path := self.artifact.path(named)).is_file():
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            with part.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if path.exists():
                    part.unlink(missing_ok=True)
                    return None
                self._fill(file, named, advance)
                file.flush()
                try:
                    rows = named.check(part, f"{named.name} of {self._origin.address}")
                except ArtifactError as error:
                    file.truncate(0)
                    raise _elsewhere(error) from None
                part.replace(path)
                return rows
        except OSError as error:
            remedy = "set XDG_CACHE_HOME to another folder, or pull it into one (wanbuild pull -o)"
            raise unwritable(f"the copy {self.artifact}", error, remedy) from error

    def _fill(self, file: BinaryIO, named: wanrun.Named, advance: Progress) -> None:
        """Appends the missing bytes of a file, range by range."""
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
                    "missing_file",
                    f"{named.name} is not at {self._origin.address}",
                    expected="all files of its manifest",
                    remedy="it may have been replaced: run wanbuild pull, or ask who published it",
                ) from None
            file.write(data)
            done += len(data)
            advance(len(data))
            if len(data) < wanted:
                break

    def _check_rows(self, group: Sequence[wanrun.Named], rows: Sequence[list[bytes] | None]) -> None:
        """Compares a parameter with its digest, and removes its files if it differs; None: not fetched."""
        if group[0].parameter is None or all(one is None for one in rows):
            return
        try:
            whole = (
                one.check(self.artifact.path(one)) if known is None else known
                for one, known in zip(group, rows, strict=True)
            )
            group[0].check_rows(whole, f"{group[0].group} of {self._origin.address}")
        except ArtifactError as error:
            for one in group:
                with suppress(OSError):
                    self.artifact.path(one).unlink()
            raise _elsewhere(error) from None

    def _discard(self, group: Sequence[wanrun.Named]) -> None:
        """Removes those files of a group that are damaged, and all of a damaged parameter."""
        there, rows = list[wanrun.Named](), list[list[bytes]]()
        for one in group:
            if (path := self.artifact.path(one)).is_file():
                try:
                    rows.append(one.check(path))
                    there.append(one)
                except ArtifactError:
                    path.unlink(missing_ok=True)
        if len(there) == len(group):
            with suppress(ArtifactError):
                self._check_rows(group, rows)


def _elsewhere(error: ArtifactError) -> ArtifactError:
    """Returns the error of a file that is damaged at its origin."""
    return ArtifactError(**{**error.parts, "remedy": "try again; if it stays so, ask who made it"})


def check_places(artifact: wanrun.Artifact) -> None:
    """Raises ArtifactError for a file among weights, which copies share, or with a name that copies use."""
    files: Mapping[str, wanrun.Named] = {one.name: one for one in artifact.named()}
    folders = [f"{component.folder}/" for component in artifact.manifest.components.values()]
    others = [f"{name}/" for name, one in files.items() if one.parameter is None]
    for before, name in itertools.pairwise(sorted([*others, *folders])):
        if before in folders and name.startswith(before):
            raise _foreign(name, f"in the weights' folder {before}")
    if own := OWN & files.keys():
        raise _foreign(min(own), "the name of a file of every copy")


def _foreign(name: str, found: str) -> ArtifactError:
    return ArtifactError(
        "untrusted",
        f"{name.rstrip('/')} cannot be a file of the artifact",
        expected="folders of weights with nothing else in them",
        found=found,
        remedy="do not use this artifact",
    )
