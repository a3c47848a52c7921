"""A checkpoint of single files, which the tests of sources share and do not change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.single_files import write_single_files, write_with_published_heads


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "checkpoint"
    write_with_published_heads(folder, "wan2.1-t2v")
    return folder


@pytest.fixture(scope="session")
def text_files(text_checkpoint: Path) -> Mapping[str, Path]:
    return write_single_files(text_checkpoint, text_checkpoint.parent / "files")
