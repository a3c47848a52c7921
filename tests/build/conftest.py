"""Fixtures of the toolchain's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which hundreds of cases make and remove their files."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="session")
def good_checkpoints(scratch: Path) -> dict[str, Path]:
    """Toys by stored dtype, one of three shards a component, one of two experts. Not to be changed."""
    from wanbuild.toy.toy_checkpoint import write_toy
    from wanbuild.toy.toy_weights import Stored

    folder = scratch / "good"
    for dtype in ("float32", "float16", "bfloat16"):
        write_toy(folder / dtype, stored=Stored(dtype=dtype), seed=2)
    write_toy(folder / "sharded", stored=Stored(shards=3), seed=3)
    write_toy(folder / "experts", "wan2.2-t2v", seed=4)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def place(scratch: Path) -> Iterator[Path]:
    """An empty folder on the file system of the good checkpoints, so that their files can be linked."""
    folder = scratch / "case"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
