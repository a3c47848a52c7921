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

from helpers.damage import Refused, edit, executable, flip, own, program
from helpers.manifests import without_profiles
from wanrun.artifact.manifest import read_manifest

Change = Callable[[Path], object]
PARAMETER = "transformer/blocks/ffn/up/weight"
CHUNK = "weights/transformer/blocks.ffn.up.weight/c/0/0/0"


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


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (Path.unlink, ["the file cannot be read (No such file or directory)", "found none"]),
        (halve, ["the file has the wrong size"]),
        (flip_middle, ["row 1 has the wrong crc32c"]),
        (into_folder, ["the file"]),
        (replace_with(b""), ["the file has the wrong size", "found 0"]),
    ],
    ids=["vanished", "halved", "flipped", "a folder", "emptied"],
)
def test_a_chunk_file_that_changes_before_it_is_opened(
    refused: Refused, artifact: Path, opens: Opens, change: Change, parts: list[str]
) -> None:
    own(artifact, "weights")
    opens.change_before(CHUNK, 1, change)
    line = refused(artifact)
    assert opens.left == 0
    assert f"weights are damaged: {PARAMETER}" in line and str(artifact / CHUNK) in line
    assert "copy the artifact again or rebuild it" in line
    for part in parts:
        assert part in line


def test_all_weights_that_vanish_before_one_is_opened(refused: Refused, artifact: Path, opens: Opens) -> None:
    """Any thread may be the first to miss its file."""
    own(artifact, "weights")
    opens.change_before(CHUNK, 1, lambda path: shutil.rmtree(path.parents[4]))
    line = refused(artifact)
    assert opens.left == 0
    assert "weights are damaged: " in line and "the file cannot be read" in line and str(artifact) in line
    assert "copy the artifact again or rebuild it" in line


def test_an_artifact_that_is_moved_away(refused: Refused, artifact: Path, opens: Opens) -> None:
    opens.change_before(CHUNK, 1, lambda path: artifact.rename(artifact.with_name("elsewhere")))
    line = refused(artifact)
    assert opens.left == 0
    assert str(artifact) in line and ("cannot be read" in line or "missing" in line or "No such file" in line)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda path: os.truncate(path, 0), "the file is truncated"),
        (halve, "the file is truncated"),
        (flip_middle, "row 1 has the wrong crc32c"),
        (lambda path: flip(path, path.stat().st_size - 1), "the file's own crc32c is wrong"),
    ],
    ids=["emptied", "halved", "flipped", "checksum flipped"],
)
def test_a_chunk_file_that_changes_after_it_is_opened(
    refused: Refused, artifact: Path, monkeypatch: pytest.MonkeyPatch, change: Change, part: str
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
    line = refused(artifact)
    assert f"weights are damaged: {PARAMETER}" in line and part in line and str(path) in line


def test_a_storage_that_fails(refused: Refused, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [0], os.preadv

    def preadv(*arguments: Any) -> int:
        reads[0] += 1
        if reads[0] == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    line = refused(artifact)
    assert "weights are damaged" in line and "reading failed (Input/output error)" in line


# --- what is read before them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (Path.unlink, "is not an artifact; found no manifest.json in it"),
        (halve, "cannot be read"),
        (replace_with(b"{}"), "is not a Wan artifact"),
        (lambda path: shutil.rmtree(path.parent), "is not an artifact; found no such folder"),
        (
            lambda path: edit(path.parent, lambda data: data["model"]["defaults"].update(fps=99)),
            "was changed after it was written",
        ),
        (
            lambda path: without_profiles(read_manifest(path.parent)).write(path.parent),
            "has no profiles",
        ),
    ],
    ids=["vanished", "halved", "another file", "all gone", "edited", "built again"],
)
def test_a_manifest_that_changes_between_two_readings(
    refused: Refused, artifact: Path, opens: Opens, change: Change, part: str
) -> None:
    opens.change_before("manifest.json", 2, change)
    line = refused(artifact)
    assert opens.left == 0
    assert part in line


@pytest.mark.parametrize(
    ("time", "change", "part"),
    [
        (1, Path.unlink, "is damaged; expected sha256"),
        (1, flip_middle, "is damaged; expected sha256"),
        (2, Path.unlink, "found No such file"),
        (2, replace_with(b'{"version": "1.0"'), "is damaged; expected sha256"),
        (2, into_folder, "found Is a directory"),
    ],
)
def test_a_tokenizer_that_changes(
    refused: Refused, artifact: Path, opens: Opens, time: int, change: Change, part: str
) -> None:
    own(artifact, "tokenizer")
    opens.change_before("tokenizer.json", time, change)
    line = refused(artifact, "--no-embedding-cache")
    assert opens.left == 0
    assert str(artifact / "tokenizer" / "tokenizer.json") in line and part in line


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("prepare", Path.unlink, "No such file"),
        ("denoise_step", flip_middle, "is damaged"),
        ("decode_video", halve, "is damaged"),
    ],
    ids=["vanished", "flipped", "halved"],
)
def test_a_program_that_changes(
    refused: Refused, artifact: Path, opens: Opens, name: str, change: Change, part: str
) -> None:
    own(artifact, "programs")
    path = program(artifact, name)
    opens.change_before(path.name, 1, change)
    line = refused(artifact)
    assert opens.left == 0
    assert f"the program {path} is damaged" in line and part in line


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("denoise_step", Path.unlink),
        ("denoise_step", flip_first),
        ("denoise_step", flip_middle),
        ("decode_video", halve),
        ("decode_video", into_folder),
    ],
)
def test_an_executable_that_changes(
    refused: Refused, artifact: Path, opens: Opens, name: str, change: Change
) -> None:
    """It is opened once: the bytes that are checked are those that JAX is handed."""
    own(artifact, "executables")
    path = executable(artifact, name)
    opens.change_before(path.name, 1, change)
    line = refused(artifact)
    assert opens.left == 0
    assert f"the executable {path} is damaged; expected sha256" in line
    assert "wanbuild compile" in line
