"""What cannot be built is told with the nearest shapes that can."""

from __future__ import annotations

import re

import pytest

from helpers.manifests import plain_model
from helpers.media_files import task_of
from wanrun.artifact.model import Chunking, Model
from wanrun.artifact.possible import check_in_chunks, check_possible
from wanrun.errors import UsageError

MODEL, FIRST, BOTH, SEGMENTS = (
    plain_model(size_multiple=16, vae_temporal=4, task=task_of(variant, encoder=False))
    for variant in ("wan2.1-t2v", "wan2.1-i2v", "wan2.2-i2v", "wan2.2-animate")
)


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
    ("frames", "model", "nearest"),
    [
        (80, MODEL, [77, 81]),
        (0, MODEL, [1]),
        (-7, FIRST, [1]),
        (2, FIRST, [1, 5]),
        (3, SEGMENTS, [5]),
        (1, SEGMENTS, [5]),
        (6, SEGMENTS, [5, 9]),
        (1, BOTH, [5]),
        (2, BOTH, [5]),
    ],
)
def test_the_nearest_frames(frames: int, model: Model, nearest: list[int]) -> None:
    with pytest.raises(UsageError) as raised:
        check_possible(model, None, frames)
    assert raised.value.fields == ("num_frames",)
    named = list(map(int, re.findall("[0-9]+", raised.value.remedy or "")))
    assert named == nearest
    for one in named:
        check_possible(model, None, one)


def test_what_can_be_built_passes() -> None:
    check_possible(BOTH, (832, 480), 81)
    check_possible(FIRST, (832, 480), 1)
    check_possible(MODEL, None, None)


def test_what_no_profile_of_chunks_has() -> None:
    live, alone = (plain_model(chunks=Chunking(first=3, each=3, alone=alone)) for alone in (False, True))
    check_in_chunks(plain_model(), 2, True)
    check_in_chunks(live, 1, False)
    check_in_chunks(alone, 1, True)
    for model, videos, guidance, name in (
        (live, 1, True, "guidance_scale"),
        (live, 2, False, "num_videos"),
        (alone, 2, True, "num_videos"),
    ):
        with pytest.raises(UsageError) as raised:
            check_in_chunks(model, videos, guidance)
        assert raised.value.fields == (name,)
