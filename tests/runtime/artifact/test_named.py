"""Each kind of file is read whole or compared block by block, and told of in one way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.damage import flip, linked, own
from helpers.elsewhere import build_elsewhere, record_verdict
from helpers.manifests import put_adapter
from helpers.refusals import refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.named import KINDS, REQUIREMENTS, WEIGHTS, Named
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.trust.verdict import Verdict


@pytest.fixture
def small(tmp_path: Path) -> tuple[Named, Path]:
    """A file of a kind whose size no manifest says."""
    (tmp_path / "requirements.txt").write_bytes(b"jax==1")
    return Named(REQUIREMENTS, "requirements.txt", "cpu", sha256_of(b"jax==1")), tmp_path / "requirements.txt"


def test_a_file_is_read_if_it_is_the_one(small: tuple[Named, Path]) -> None:
    named, path = small
    assert named.read(path) == b"jax==1" and named.check(path) == []
    assert named.group == named.name and named.most == REQUIREMENTS.most
    for damage, found in (
        (lambda: path.write_bytes(b"jax==2"), sha256_of(b"jax==2")),
        (lambda: os.truncate(path, REQUIREMENTS.most + 1), str(REQUIREMENTS.most)),
        (path.unlink, "No such file or directory"),
        (path.mkdir, "Is a directory"),
    ):
        damage()
        for look in (named.read, named.check):
            with refuses("damaged", ArtifactError, what=path, found=found, remedy=REQUIREMENTS.remedy):
                look(path)


def test_a_pipe_is_not_waited_for(small: tuple[Named, Path]) -> None:
    named, path = small
    path.unlink()
    os.mkfifo(path)
    with refuses("damaged", ArtifactError, what=path, expected="a file"):
        named.check(path)


@pytest.mark.parametrize("offset", [0, -1])
def test_each_kind_of_file_of_an_artifact(toy_artifact: Path, tmp_path: Path, offset: int) -> None:
    """A bit of the first and of the last byte; of weights that is the checksum behind the rows."""
    folder = linked(toy_artifact, tmp_path / "artifact")
    put_adapter(folder)
    build_elsewhere(folder)
    record_verdict(folder, Verdict(outcome="passed", reason=""))
    artifact = open_artifact(folder)
    first = {one.kind: one for one in reversed(list(artifact.named()))}
    assert first.keys() >= {kind for kind in KINDS if kind.folder not in ("golden", "embeddings")}
    for place in {one.name.partition("/")[0] for one in first.values()}:
        own(folder, place)
    for kind, one in first.items():
        path = artifact.path(one)
        one.check(path)
        flip(path, offset % path.stat().st_size)
        digest = "crc32c" if kind is WEIGHTS else "sha256"
        with refuses("damaged", ArtifactError, what=kind.what, expected=digest, remedy=kind.remedy):
            one.check(path, "it")
        if kind is not WEIGHTS:
            with refuses("damaged", ArtifactError, what=kind.what):
                one.read(path)
