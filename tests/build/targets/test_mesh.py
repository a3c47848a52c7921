"""Meshes as users write them."""

from __future__ import annotations

import pytest

from wanbuild.targets.parsing import USES, parse_mesh
from wanrun.artifact.mesh import AXES
from wanrun.errors import UsageError


def test_every_axis_has_its_use() -> None:
    assert tuple(USES) == AXES


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,context=4", {"data": 2, "context": 4}),
        (" context = 4 ".replace(" = ", "=") + ", data=2", {"data": 2, "context": 4}),
        ("data=1,context=1", {}),
        ("", {}),
        ("tensor=8", {"tensor": 8}),
    ],
)
def test_what_is_written(text: str, sizes: dict[str, int]) -> None:
    """An axis that is left out has one device; the order is always that of the table."""
    assert list(parse_mesh(text).items()) == list(sizes.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "there is no such axis; expected one of data, ring, fsdp, context, tensor; found"),
        ("2x4", "no such axis"),
        ("data=2,", "no such axis"),
        ("data=2,data=2", "data is given twice"),
        ("data", "there is no number of devices for data; expected data=2; found 'data'"),
        ("data=0", "no number of devices"),
        ("data=-2", "no number of devices"),
        ("data=2.0", "no number of devices"),
        ("data=\N{SUPERSCRIPT TWO}", "no number of devices"),
        ("data=" + "9" * 5000, "no number of devices"),
    ],
)
def test_what_is_no_mesh(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_mesh(text)
