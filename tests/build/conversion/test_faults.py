"""Faults during a conversion: kills, signals, a full disk, a failing one, a source that changes.

Whatever comes, there is the old artifact, the new one or none, the command says in one line what happened,
and nothing is left beside the artifact.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers import FAULT_RUNS, UNPRIVILEGED
from helpers.refusals import check_json, json_error
from helpers.small_disk import small_disk
from hostile.changes import WEIGHTS
from hostile.tensor_files import header_end
from wanbuild.check.verify import check_files
from wanbuild.cli import wanbuild
from wanbuild.progress_line import ProgressLine
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest


@pytest.fixture(scope="module")
def checkpoints(scratch: Path) -> Iterator[tuple[Path, Path]]:
    """Two of 38 MB that differ in weights, with parameters of a chunk file per layer. Not to be changed."""
    folder = scratch / "larger"
    for seed in (0, 1):
        sizes = {"num_attention_heads": 12, "ffn_dim": 1024, "num_layers": 9}
        write_toy(folder / str(seed), configs={"transformer": sizes}, seed=seed)
    yield folder / "0", folder / "1"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def converted(checkpoints: tuple[Path, Path], scratch: Path) -> Iterator[Path]:
    """The first of them. Not to be changed."""
    folder = scratch / "converted"
    assert convert(checkpoints[0], folder) == 0
    yield folder
    shutil.rmtree(folder)


def convert(source: Path, artifact: Path, *options: object) -> int:
    """The command's exit code."""
    return run(wanbuild, ["convert", str(source), "--artifact", str(artifact), *map(str, options)])


def digests(folder: Path) -> dict[str, str]:
    """The content of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_whole(artifact: Path) -> Manifest:
    manifest = read_manifest(artifact)
    check_files(Artifact(manifest, artifact), lambda line: None)
    return manifest


# --- kills, signals, two at once ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_builds_that_are_killed_or_compete(checkpoints: tuple[Path, Path], place: Path) -> None:
    result = subprocess.run(
        [sys.executable, FAULT_RUNS, place, *checkpoints],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    print(result.stdout)  # what was run, the seed, and where the kills fell
    assert result.returncode == 0, result.stderr


# --- a disk that is full, or fails --------------------------------------------------------------------------


def free_space(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=nbytes))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_a_disk_that_gets_full(
    checkpoints: tuple[Path, Path],
    converted: Path,
    place: Path,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another program takes the space that was free at the start: at the first, middle and last files."""
    needed = sum(path.stat().st_blocks * 512 for path in converted.rglob("*"))
    with small_disk(place, needed + int(share * needed)):
        artifact = shutil.copytree(converted, place / "artifact")
        before = digests(artifact)
        free_space(monkeypatch, 2**40)
        for target, options in ((artifact, ["--force"]), (place / "other", [])):
            capsys.readouterr()
            assert convert(checkpoints[1], target, *options, "--json-errors") == 4
            assert json_error(capsys.readouterr().err)["code"] == "no_space"
            assert names(place) == {"artifact"}
        assert digests(artifact) == before


def test_a_disk_that_is_too_small(
    checkpoints: tuple[Path, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(place, 2**20):
        assert convert(checkpoints[0], place / "artifact", "--json-errors") == 4
        error = check_json(capsys.readouterr().err, "no_space", message=str(place))
        assert re.match(r"\d+\.\d MB", error["expected"]) and re.fullmatch(r"\d\.\d+ MB", error["found"])
        assert names(place) == set()


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(
    checkpoints: tuple[Path, Path], converted: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a file system without large files; it needs no privileges."""
    artifact = shutil.copytree(converted, place / "artifact")
    before = digests(artifact)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        code = convert(checkpoints[1], artifact, "--force", "--json-errors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 4
    check_json(capsys.readouterr().err, "no_space", message=(os.strerror(errno.EFBIG), "ulimit -f"))
    assert names(place) == {"artifact"}
    assert digests(artifact) == before


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails(
    checkpoints: tuple[Path, Path],
    converted: Path,
    place: Path,
    call: str,
    error: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    artifact = shutil.copytree(converted, place / "artifact")
    before = digests(artifact)
    original, calls = getattr(os, call), iter(range(10**9))
    allowed = {"write": 50, "fsync": 10, "mkdir": 40, "rename": 1}[call]

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == allowed:
            raise OSError(error, os.strerror(error), "x")
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert convert(checkpoints[1], artifact, "--force", "--json-errors") == 4
    assert next(calls) > allowed
    said = json_error(capsys.readouterr().err)
    assert said["code"] == ("no_space" if error == errno.ENOSPC else "unwritable")
    assert error == errno.ENOSPC or os.strerror(error) in said["message"]
    assert names(place) == {"artifact"}
    assert digests(artifact) == before


def test_a_source_that_cannot_be_read_on(
    checkpoints: tuple[Path, Path],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original, calls = os.preadv, iter(range(10**9))

    def fail(*arguments: Any) -> int:
        if next(calls) == 100:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
    assert convert(checkpoints[0], place / "artifact", "--json-errors") == 4
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "unreadable" and os.strerror(errno.EIO) in error["message"]
    assert names(place) == set()


# --- a source that changes ----------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def change_in_the_middle(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Does something once, when a part of the source has been converted."""
    original, calls = ProgressLine.advance, iter(range(10**9))

    def advance(self: ProgressLine, count: int = 1) -> None:
        if next(calls) == 3:
            change()
        original(self, count)

    monkeypatch.setattr(ProgressLine, "advance", advance)


@pytest.mark.slow
@pytest.mark.parametrize("change", [truncate, empty])
@pytest.mark.parametrize("component", WEIGHTS)
def test_a_source_that_is_cut_off_meanwhile(
    checkpoints: tuple[Path, Path],
    place: Path,
    component: str,
    change: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reader of a mapping would be ended by SIGBUS."""
    source = shutil.copytree(checkpoints[0], place / "source")
    file = source / WEIGHTS[component]
    change_in_the_middle(monkeypatch, lambda: change(file))
    assert convert(source, place / "artifact", "--threads", 1, "--json-errors") == 4
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "damaged" and str(file) in error["message"]
    assert names(place) == {"source"}


@pytest.mark.thorough
@pytest.mark.parametrize("file", [*WEIGHTS.values(), "vae/config.json", "tokenizer/tokenizer.json", ""])
def test_a_source_that_is_deleted_meanwhile(
    checkpoints: tuple[Path, Path], converted: Path, place: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is needed was opened or read before: the artifact is the same."""
    source = shutil.copytree(checkpoints[0], place / "source")
    delete = (source / file).unlink if file else lambda: shutil.rmtree(source)
    change_in_the_middle(monkeypatch, delete)
    assert convert(source, place / "artifact", "--threads", 1) == 0
    assert assert_whole(place / "artifact").content_digest == read_manifest(converted).content_digest


@pytest.mark.slow
def test_a_config_that_is_replaced_meanwhile(
    checkpoints: tuple[Path, Path], converted: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest that is recorded is of what was used."""
    source = shutil.copytree(checkpoints[0], place / "source")
    config = source / "vae" / "config.json"
    change_in_the_middle(monkeypatch, lambda: config.write_text("{}"))
    assert convert(source, place / "artifact", "--threads", 1) == 0
    assert assert_whole(place / "artifact").content_digest == read_manifest(converted).content_digest


# --- rights -------------------------------------------------------------------------------------------------

WITHOUT_RIGHTS = """
import json, sys
from wanbuild.cli import wanbuild
from wancli.console import run
for source, artifact in json.loads(sys.argv[1]):
    print(run(wanbuild, ["convert", source, "--artifact", artifact]))
"""


@pytest.mark.slow
def test_without_rights(checkpoints: tuple[Path, Path], place: Path) -> None:
    """Files and folders that may not be read, and a folder in which nothing may be written."""
    cases: list[tuple[Path, str]] = []
    for number, name in enumerate(
        [WEIGHTS["vae"], "vae/config.json", "model_index.json", "tokenizer/tokenizer.json", "transformer", ""]
    ):
        source = shutil.copytree(checkpoints[0], place / f"source{number}", copy_function=os.link)
        path = source / name
        if path.is_file():  # its mode is that of all its links
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
        path.chmod(0)
        cases.append((source, f"{path}"))
    closed = place / "closed"
    closed.mkdir(0o555)
    arguments = [(str(source), str(place / "artifact")) for source, _ in cases]
    arguments.append((str(checkpoints[0]), str(closed / "artifact")))
    result = subprocess.run(
        [
            sys.executable,
            UNPRIVILEGED,
            sys.executable,
            "-c",
            WITHOUT_RIGHTS,
            json.dumps(arguments),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for source, _ in cases:
        source.chmod(0o755)
        (source / "transformer").chmod(0o755)
    lines = result.stderr.splitlines()
    assert result.stdout.split() == ["4"] * len(cases) + ["2"], result.stderr
    assert len(lines) == len(arguments) and all(line.startswith("error: ") for line in lines), lines
    for (_, path), line in zip(cases, lines, strict=False):
        assert path in line and "Permission denied" in line, line
    assert f"make {closed} writable" in lines[-1]
    assert names(closed) == set() and "artifact" not in names(place)


# --- zeros --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("checkpointer", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_weights_that_are_all_zero(
    checkpoints: tuple[Path, Path], place: Path, checkpointer: type[Any]
) -> None:
    """Each tensor is a hole in a sparse file. TensorStore would leave out such chunks unless told."""
    source = shutil.copytree(checkpoints[0], place / "source")
    for file in WEIGHTS.values():
        size = (source / file).stat().st_size
        os.truncate(source / file, header_end((source / file).read_bytes()))
        os.truncate(source / file, size)
        assert (source / file).stat().st_blocks * 512 < size // 10
    assert convert(source, place / "artifact") == 0
    manifest = assert_whole(place / "artifact")
    for component in manifest.components.values():
        folder = place / "artifact" / component.folder
        for path, parameter in component.parameters.items():
            for chunk in range(parameter.layout.chunks):
                file = folder / path.replace("/", ".") / parameter.layout.chunk_file(chunk)
                assert file.stat().st_size == parameter.layout.chunk_bytes + 4
        leaves = jax.tree_util.tree_leaves_with_path(checkpointer().restore(folder))
        found = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
        assert found.keys() == component.parameters.keys()
        for path, parameter in component.parameters.items():
            assert (found[path].shape, found[path].dtype.name) == (
                parameter.layout.shape,
                parameter.layout.dtype,
            )
            assert not np.asarray(found[path]).any()
