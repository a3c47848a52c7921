"""What cannot be built is told with the nearest shapes that can."""

from __future__ import annotations

import re

import pytest

from helpers.manifests import plain_model
from wanrun.artifact.possible import check_possible
from wanrun.errors import UsageError

MODEL = plain_model(size_multiple=16, vae_temporal=4)
SEGMENT = (5, "a segment may begin with 5 of the one before")


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((60, 30), ["64x32", "48x32"]),
        ((832, 470), ["832x464", "832x480"]),
        ((100, 100), ["96x96", "96x112"]),
        ((3, 2), ["16x16"]),
        ((40, 24), ["32x16", "32x32"]),
    ],
)
def test_the_nearest_sizes(size: tuple[int, int], nearest: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        check_possible(MODEL, size, None)
    assert raised.value.fields == ("size",)
    named = re.findall(r"[0-9]+x[0-9]+", raised.value.remedy or "")
    assert named == nearest
    for one in named:
        width, height = map(int, one.split("x"))
        check_possible(MODEL, (width, height), None)


@pytest.mark.parametrize(
    ("frames", "least", "nearest"),
    [
        (80, (1, ""), [77, 81]),
        (0, (1, ""), [1]),
        (-7, (1, ""), [1]),
        (2, (1, ""), [1, 5]),
        (3, SEGMENT, [5]),
        (1, SEGMENT, [5]),
        (6, SEGMENT, [5, 9]),
    ],
)
def test_the_nearest_frames(frames: int, least: tuple[int, str], nearest: list[int]) -> None:
    with pytest.raises(UsageError) as raised:
        check_possible(MODEL, None, frames, least)
    assert raised.value.fields == ("num_frames",)
    named = list(map(int, re.findall("[0-9]+", raised.value.remedy or "")))
    assert named == nearest
    for one in named:
        check_possible(MODEL, None, one, least)


def test_what_can_be_built_passes() -> None:
    check_possible(MODEL, (832, 480), 81, SEGMENT)
    check_possible(MODEL, None, None)
