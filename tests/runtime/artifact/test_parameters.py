"""What the manifest says of weights: a checksum a row, an axis a dimension, and paths in the artifact."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.refusals import refuses
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.parameters import Component, Parameter
from wanrun.errors import ArtifactError


def parameter(shape: tuple[int, ...] = (4, 6), rows: int = 2, **changes: Any) -> Parameter:
    plain: dict[str, Any] = {
        "layout": ArrayLayout(shape, "bfloat16", rows, 1),
        "axes": ("layers", None),
        "crc32c": ("00000000",) * rows,
        "sha256": "0",
    }
    return Parameter(**{**plain, **changes})


def test_a_component_has_the_bytes_of_its_arrays() -> None:
    assert Component("weights/vae", {"a": parameter(), "b/c": parameter((2, 6))}).nbytes == 2 * (24 + 12)
    assert Component("weights/vae", {}).nbytes == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_row_has_a_checksum(count: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{count} .*\b2 "):
        parameter(crc32c=("00000000",) * count)


@pytest.mark.parametrize("axes", [(), ("layers",), ("layers", None, None)])
def test_a_dimension_has_an_axis(axes: tuple[str | None, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(str(axes))}.*\(4, 6\)"):
        parameter(axes=axes)


@pytest.mark.parametrize("path", ["/a", "../a", "a//b", ""])
def test_paths_stay_in_the_artifact(path: str) -> None:
    with refuses("untrusted", ArtifactError, what="a component", found=repr(path)):
        Component(path, {})
    with refuses("untrusted", ArtifactError, what="a parameter", found=repr(path)):
        Component("weights/vae", {path: parameter()})


def test_a_parameter_is_no_folder_of_others() -> None:
    """Both cannot be in one tree."""
    Component("weights/vae", {"a/b": parameter(), "ab": parameter(), "a/c/d": parameter()})
    with pytest.raises(ValueError, match=r"^a/c "):
        Component("weights/vae", {"a/c/d": parameter(), "a/c": parameter()})
