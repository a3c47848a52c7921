"""The files that a manifest lists, and what each must be: its size and its digests."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

import wanrun
from wanrun.errors import ArtifactError

CRC_BYTES: Final = 4
"""Behind the rows of a chunk file: see docs/format.md."""

BLOCK_BYTES: Final = 2**20

OWN: Final = frozenset({".partial-copy.json", "manifest.json", "model.sig"})
"""Files that a copy has beside those of its manifest."""


@dataclass(frozen=True)
class Expected:
    """A file that a manifest lists.

    Attributes:
        nbytes: its size; None if the manifest does not say.
        sha256: the digest of its bytes; empty of a chunk file of weights.
        parameter: of a chunk file, the parameter's path in its component and record.
        index: the number of the chunk file.
        folder: the parameter's folder.
    """

    nbytes: int | None
    sha256: str = ""
    parameter: tuple[str, Any] | None = None
    index: int = 0
    folder: str = ""

    @property
    def siblings(self) -> list[str]:
        """All chunk files of the parameter."""
        assert self.parameter is not None
        layout = self.parameter[1].layout
        return [f"{self.folder}/{layout.chunk_file(index)}" for index in range(layout.chunks)]


def expected_files(manifest: wanrun.Manifest) -> Mapping[str, Expected]:
    """Returns every file that a manifest lists by its path; those of Orbax's metadata are not listed.

    Raises:
        ArtifactError: if a file lies among weights, which copies share, or has the name of a copy's own.
    """
    weights, others = dict(_weights(manifest)), dict(_others(manifest))
    folders = [f"{component.folder}/" for component in manifest.components.values()]
    named = sorted([*(f"{name}/" for name in others), *folders])
    for before, name in itertools.pairwise(named):
        if before in folders and name.startswith(before):
            raise _foreign(name, f"in the weights' folder {before}")
    if own := OWN & others.keys():
        raise _foreign(min(own), "the name of a file of every copy")
    return weights | others


def _foreign(name: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"{name.rstrip('/')} cannot be a file of the artifact",
        expected="folders of weights with nothing else in them",
        found=found,
        remedy="do not use this artifact",
    )


def _weights(manifest: wanrun.Manifest) -> Iterator[tuple[str, Expected]]:
    for component in manifest.components.values():
        for path, parameter in sorted(component.parameters.items()):
            folder, layout = f"{component.folder}/{path.replace('/', '.')}", parameter.layout
            for index in range(layout.chunks):
                nbytes = layout.chunk_bytes + CRC_BYTES
                chunk = Expected(nbytes, "", (path, parameter), index, folder)
                yield f"{folder}/{layout.chunk_file(index)}", chunk


def _others(manifest: wanrun.Manifest) -> Iterator[tuple[str, Expected]]:
    listed: list[Any] = [manifest.tokenizer, *manifest.golden.values(), *manifest.embeddings.values()]
    listed += [target.requirements for target in manifest.targets.values()]
    for programs in manifest.program_sets.values():
        listed += [one for named in programs.programs.values() for one in named.values()]
    for one in listed:
        yield one.file, Expected(None, one.sha256)
    for target in manifest.targets.values():
        for named in target.executables.values():
            for entry in named.values():
                yield f"{target.folder}/{entry.file}", Expected(entry.nbytes, entry.sha256)


def check_file(path: Path, what: str, expected: Expected) -> list[bytes]:
    """Compares a file with what the manifest lists.

    Args:
        path: where it is.
        what: the file, for messages.
        expected: what the manifest lists.

    Returns:
        Of a chunk file the sha256 digest of each row, for ``check_parameter``; of others nothing.

    Raises:
        ArtifactError: if it has another size or digest.
        OSError: if it cannot be read.
    """
    size = path.stat().st_size
    if expected.nbytes not in (None, size):
        raise ArtifactError(f"{what} is damaged", expected=f"{expected.nbytes} bytes", found=f"{size} bytes")
    if expected.parameter is not None:
        return _row_digests(path, what, expected.parameter[1])
    with wanrun.open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected.sha256:
        raise _damaged(what, expected.sha256, found)
    return []


def check_parameter(
    files: Sequence[Path], what: str, expected: Expected, rows: Sequence[list[bytes] | None]
) -> None:
    """Compares a parameter with its digest.

    Args:
        files: all its chunk files, in order.
        what: the parameter, for messages.
        expected: one of its chunk files.
        rows: by chunk file, what ``check_file`` has returned; None to read it.

    Raises:
        ArtifactError: if it has another digest.
        OSError: if a file cannot be read.
    """
    assert expected.parameter is not None
    parameter, whole = expected.parameter[1], hashlib.sha256()
    for file, known in zip(files, rows, strict=True):
        for digest in _row_digests(file, str(file), parameter) if known is None else known:
            whole.update(digest)
    if whole.hexdigest() != parameter.sha256:
        raise _damaged(what, parameter.sha256, whole.hexdigest())


def together(names: Iterable[str], expected: Mapping[str, Expected]) -> list[list[str]]:
    """Returns files in groups: the chunk files of a parameter, each other one alone."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: expected[name].index):
        groups.setdefault(expected[name].folder or name, []).append(name)
    return list(groups.values())


def check_there(folder: Path, group: Sequence[str], expected: Mapping[str, Expected]) -> None:
    """Compares those files of a group that are there, and a parameter of which all are there.

    Args:
        folder: the artifact's.
        group: as of ``together``.
        expected: what the manifest lists.

    Raises:
        ArtifactError: naming the first file that is another one, or cannot be read.
    """
    paths = {name: folder / name for name in group if (folder / name).exists()}
    try:
        rows = [check_file(path, str(path), expected[name]) for name, path in paths.items()]
    except OSError as error:
        raise ArtifactError(f"{error.filename} cannot be read", found=error.strerror) from error
    one = expected[group[0]]
    if one.parameter is not None and len(rows) == len(one.siblings):
        check_parameter(list(paths.values()), one.folder, one, rows)


def _row_digests(path: Path, what: str, parameter: Any) -> list[bytes]:
    """Returns the sha256 digest of each row of a chunk file, whose own crc32c must fit."""
    layout, digests, checksum = parameter.layout, list[bytes](), 0
    with wanrun.open_regular(path) as file:
        for _ in range(layout.rows_per_chunk):
            digest, left = hashlib.sha256(), layout.row_bytes
            while block := file.read(min(left, BLOCK_BYTES)):
                digest.update(block)
                checksum = crc32c(block, checksum)
                left -= len(block)
            digests.append(digest.digest())
        trailer = int.from_bytes(file.read(CRC_BYTES), "little")
    if trailer != checksum:
        raise ArtifactError(f"{what} is damaged", expected=f"crc32c {checksum:08x}", found=f"{trailer:08x}")
    return digests


def _damaged(what: str, sha256: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"{what} is damaged",
        expected=f"sha256 {sha256}",
        found=found,
        remedy="try again; if it stays so, ask who made it",
    )
