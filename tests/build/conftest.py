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


@pytest.fixture
def place(scratch: Path) -> Iterator[Path]:
    """An empty folder on the file system of the scratch folder."""
    folder = scratch / "case"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
