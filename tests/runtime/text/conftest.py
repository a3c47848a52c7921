"""A manifest for the tests of embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.artifact.manifest import Manifest


@pytest.fixture(scope="session")
def manifest(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The toy's, converted and not compiled."""
    from wanbuild.build import convert
    from wanbuild.conversion.convert_request import ConvertRequest

    return convert(ConvertRequest(toy_checkpoint, tmp_path_factory.mktemp("converted") / "artifact"))
