"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test imports a hub client: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random wan2.1-t2v checkpoint in the published layout, seed 0, float32. Not to be changed."""
    from wanbuild.toy import write_toy

    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    write_toy(folder, "wan2.1-t2v", seed=0)
    return folder
