"""An artifact that changes, shrinks or vanishes while it is read: one line, exit code 3, nothing written.

Each change is made at one moment: right before the n-th time that a file is opened, or before an open one is
read.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import Declines, edit, executable, flip, own, program
from helpers.manifests import without_profiles
from wanrun.artifact.manifest import read_manifest
from wanrun.files import sha256_of

Change = Callable[[Path], object]
PARAMETER = "transformer/blocks/ffn/up/weight"
CHUNK = "weights/transformer/blocks.ffn.up.weight/c/0/0/0"
SIZE = 26_884
"""Bytes of that file; the last four are its own crc32c."""
GONE, FOLDER = os.strerror(errno.ENOENT), os.strerror(errno.EISDIR)
REBUILT, OTHER = "wanbuild convert --force", b'{"version": "1.0"'


class Opens:
    """Makes changes right before files are opened. An audit hook cannot be removed: it is idle instead."""

    def __init__(self) -> None:
        self._awaited: list[tuple[str, Change]] = []
        self.left = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._awaited or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        name, change = self._awaited[0]
        if not path.endswith(name):
            return
        self.left -= 1
        if self.left == 0:
            self._awaited.clear()  # first: what the change opens is not awaited
            change(Path(path))

    def change_before(self, name: str, time: int, change: Change) -> None:
        """Makes the change right before a file whose path ends with name is opened for the n-th time."""
        self._awaited[:], self.left = [(name, change)], time

    def reset(self) -> None:
        self._awaited.clear()
        self.left = 0


@pytest.fixture(scope="session")
def audited() -> Opens:
    return Opens()


@pytest.fixture
def opens(audited: Opens) -> Iterator[Opens]:
    yield audited
    audited.reset()


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_first(path: Path) -> None:
    flip(path, 0)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_with(data: bytes) -> Change:
    """Another file under the same name, as a copy or a new build puts it there."""

    def change(path: Path) -> None:
        other = path.with_name(path.name + ".new")
        other.write_bytes(data)
        other.replace(path)

    return change


def of_program(name: str) -> Callable[[Path], Path]:
    return lambda artifact: program(artifact, name)


def of_executable(name: str) -> Callable[[Path], Path]:
    return lambda artifact: executable(artifact, name)


def chunk(artifact: Path) -> Path:
    return artifact / CHUNK


def tokenizer(artifact: Path) -> Path:
    return artifact / "tokenizer" / "tokenizer.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "time", "change", "parts"),
    [
        (chunk, 1, Path.unlink, {"message": (PARAMETER, GONE), "found": "none"}),
        (chunk, 1, halve, {"message": PARAMETER, "expected": SIZE, "found": SIZE // 2}),
        (chunk, 1, flip_middle, {"message": (PARAMETER, "row 1", "crc32c")}),
        (chunk, 1, into_folder, {"message": PARAMETER, "found": "none"}),
        (chunk, 1, replace_with(b""), {"message": PARAMETER, "expected": SIZE, "found": 0}),
        (tokenizer, 1, Path.unlink, {"found": GONE}),
        (tokenizer, 1, flip_middle, {}),
        (tokenizer, 2, Path.unlink, {"found": GONE}),
        (tokenizer, 2, replace_with(OTHER), {"found": sha256_of(OTHER)}),
        (tokenizer, 2, into_folder, {"found": FOLDER}),
        (of_program("prepare"), 1, Path.unlink, {"found": GONE}),
        (of_program("denoise_step"), 1, flip_middle, {}),
        (of_program("decode_video"), 1, halve, {}),
        # It is opened once: the bytes that are checked are those that JAX is handed.
        (of_executable("denoise_step"), 1, Path.unlink, {}),
        (of_executable("denoise_step"), 1, flip_first, {}),
        (of_executable("denoise_step"), 1, flip_middle, {}),
        (of_executable("decode_video"), 1, halve, {}),
        (of_executable("decode_video"), 1, into_folder, {}),
    ],
)
def test_a_file_that_changes_before_it_is_opened(
    declines: Declines,
    artifact: Path,
    opens: Opens,
    find: Callable[[Path], Path],
    time: int,
    change: Change,
    parts: dict[str, object],
) -> None:
    path = find(artifact)
    kind = path.relative_to(artifact).parts[0]
    own(artifact, kind)
    opens.change_before(path.relative_to(artifact).as_posix(), time, change)
    rebuilt = {"weights": REBUILT, "programs": "wanbuild compile", "executables": "wanbuild compile"}
    parts = {"expected": "" if kind == "weights" else "sha256 ", "remedy": rebuilt.get(kind, ""), **parts}
    error = declines(artifact, "damaged", "--no-embedding-cache", **parts)
    assert opens.left == 0
    assert str(path) in error["message"]


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        (Path.unlink, "wrong_kind", {"found": "manifest.json"}),
        (halve, "unreadable", {"message": "manifest.json"}),
        (replace_with(b"{}"), "wrong_kind", {"expected": "wan-artifact"}),
        (lambda path: shutil.rmtree(path.parent), "missing_file", {"found": "no such folder"}),
        (
            lambda path: edit(path.parent, lambda data: data["model"]["defaults"].update(fps=99)),
            "changed",
            {"expected": "content_digest sha256:", "found": "sha256:"},
        ),
        (
            lambda path: without_profiles(read_manifest(path.parent)).write(path.parent),
            "not_built",
            {"remedy": "wanbuild compile"},
        ),
    ],
    ids=["vanished", "halved", "another file", "all gone", "edited", "built again"],
)
def test_a_manifest_that_changes_between_two_readings(
    declines: Declines,
    artifact: Path,
    opens: Opens,
    change: Change,
    error: str,
    parts: dict[str, object],
) -> None:
    opens.change_before("manifest.json", 2, change)
    assert str(artifact) in declines(artifact, error, **parts)["message"]
    assert opens.left == 0


def test_all_weights_that_vanish_before_one_is_opened(
    declines: Declines, artifact: Path, opens: Opens
) -> None:
    """Any thread may be the first to miss its file."""
    own(artifact, "weights")
    opens.change_before(CHUNK, 1, lambda path: shutil.rmtree(path.parents[4]))
    declines(artifact, "damaged", message=(artifact / "weights", GONE), remedy=REBUILT)
    assert opens.left == 0


def test_an_artifact_that_is_moved_away(declines: Declines, artifact: Path, opens: Opens) -> None:
    opens.change_before(CHUNK, 1, lambda path: artifact.rename(artifact.with_name("elsewhere")))
    declines(artifact, "damaged", message=artifact)
    assert opens.left == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda path: os.truncate(path, 0), {"expected": SIZE - 4, "found": 0}),
        (halve, {"expected": SIZE - 4, "found": SIZE // 2}),
        (flip_middle, {"message": ("row 1", "crc32c")}),
        (lambda path: flip(path, path.stat().st_size - 1), {"message": "own crc32c"}),
    ],
    ids=["emptied", "halved", "flipped", "checksum flipped"],
)
def test_a_chunk_file_that_changes_after_it_is_opened(
    declines: Declines,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    parts: dict[str, object],
) -> None:
    own(artifact, "weights")
    path, descriptors, read, opened = artifact / CHUNK, [], os.preadv, os.open

    def open_file(name: Any, *arguments: Any) -> int:
        descriptor = opened(name, *arguments)
        if os.fspath(name) == str(path):
            descriptors.append(descriptor)
        return descriptor

    def preadv(descriptor: int, *arguments: Any) -> int:
        if descriptor in descriptors:
            descriptors.clear()
            change(path)
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", preadv)
    error = declines(artifact, "damaged", **parts)
    assert PARAMETER in error["message"] and str(path) in error["message"]


def test_a_storage_that_fails(declines: Declines, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [0], os.preadv

    def preadv(*arguments: Any) -> int:
        reads[0] += 1
        if reads[0] == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    declines(artifact, "damaged", message=os.strerror(errno.EIO))
