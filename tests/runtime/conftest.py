"""Fixtures shared by the tests of the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.stored_weights import Stored, convert_transformer, write_plain
from wanrun.artifact.parameters import Parameter
from wanrun.weights.restore import Restore


@pytest.fixture(scope="module")
def stored(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The toy's transformer. Not to be changed."""
    return convert_transformer(toy_checkpoint, tmp_path_factory.mktemp("converted") / "artifact")


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Parameter, np.ndarray]:
    """A checkpoint of one array without checksums, its entry in a manifest, and its values."""
    return write_plain(tmp_path / "model")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The components that are read, in order."""
    read: list[str] = []
    begin = Restore.__init__

    def record(self: Restore, artifact: Path, name: str, *arguments: Any, **options: Any) -> None:
        read.append(name)
        begin(self, artifact, name, *arguments, **options)

    monkeypatch.setattr(Restore, "__init__", record)
    return read
