"""Fixtures shared by the tests of the runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stored_weights import Stored, convert_transformer, write_plain
from wanrun.manifest import Parameter


@pytest.fixture(scope="module")
def stored(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The toy's transformer. Not to be changed."""
    return convert_transformer(toy_checkpoint, tmp_path_factory.mktemp("converted") / "artifact")


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Parameter, np.ndarray]:
    """A checkpoint of one array without checksums, its entry in a manifest, and its values."""
    return write_plain(tmp_path / "model")
