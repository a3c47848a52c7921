"""Artifacts of a variant, which the tests of adapters share and do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import TRANSFORMERS

Made = tuple[Path, Path]
"""A checkpoint, and an artifact of it in float32 without profiles."""


@pytest.fixture(scope="package")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Makes a variant's toy and its artifact, once. Not to be changed."""
    folder = tmp_path_factory.mktemp("converted")

    def make(variant: str) -> Made:
        source, artifact = folder / variant, folder / f"{variant}-artifact"
        if not artifact.exists():
            write_toy(source, variant)
            dtypes = dict.fromkeys(TRANSFORMERS, "float32")
            convert(ConvertRequest(source, artifact, dtypes))
        return source, artifact

    return make
