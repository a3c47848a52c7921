"""A request is read from values of every kind, and each problem is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanrun.errors import UsageError
from wanrun.media.inputs import MEDIA_KINDS
from wanrun.request.reading import as_plain, read_request
from wanrun.request.request import Request
from wanrun.request.schema import rows


def refusal(**options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read_request({"prompt": "a fox", **options}.items(), Request)
    assert set(caught.value.fields) <= options.keys() | {row.name for row in rows()}
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected", "bad"),
    [
        ("boundary", "0 to 1", [-1e-9, 1.0000001, -math.inf, math.inf, math.nan, 875]),
        ("guidance_scale", "a number", [math.inf, -math.inf, math.nan, 3.5e38]),
        ("guidance_scale_2", "a number", [math.inf, -math.inf, math.nan, -3.5e38]),
        ("conditioning_scale", "a number", [math.inf, -math.inf, math.nan, 3.5e38]),
        ("flow_shift", "a positive number", [0.0, -1.0, math.nan, math.inf]),
        ("fps", "0.1 to 240", [0, 0.09, 241, math.nan, math.inf]),
        ("num_steps", "1 to 10000", [0, -1, 10_001]),
        ("segment_overlap", "1 or 5", [0, 2, 4, 6, -1]),
        ("num_frames", "an integer, at least 1", [0, -9]),
        ("timesteps", "1 to 10000 positive numbers", [[], [0], [1000, -1.0], [math.nan], [1.0] * 10_001]),
        ("seed", "an integer, at least 0, or random", [-2]),
        ("negative_prompt", "a string of at most 100000 characters", ["n" * 100_001]),
        ("size", "a string such as 832x480", ["", "64", "0x64", "64x64x64", "１２x64", "64x64\n"]),
    ],
)
def test_out_of_range(name: str, expected: str, bad: list[Any]) -> None:
    for value in bad:
        assert refusal(**{name: value}).startswith(f"{name} is out of range; expected {expected}; found ")


@pytest.mark.parametrize(
    ("name", "bad"), [("mode", ["swap", ""]), ("loop", ["while", ""]), ("solver", ["ddim"])]
)
def test_none_of_the_choices(name: str, bad: list[Any]) -> None:
    for value in bad:
        assert refusal(**{name: value}).startswith(f"{name} cannot be used; expected ")


def test_wrong_types() -> None:
    for row in rows():
        for value in (True, object(), b"a", *([] if row.record else [{"a": 1}])):
            assert refusal(**{row.name: value}).startswith(
                f"{row.name} has the wrong type; expected {row.kind}"
            )


def test_a_list_of_numbers() -> None:
    for value in ([1000, 937.5], (1000.0, 937.5), np.array([1000, 937.5])):
        found = read_request({"prompt": "a", "timesteps": value}.items(), Request)
        assert found.timesteps == (1000.0, 937.5) and all(type(item) is float for item in found.timesteps)
    for wrong in ("1000,937.5", 1000.0, [1000, True], ["1000"], [[1000]], np.array([[1000.0]])):
        assert refusal(timesteps=wrong).startswith(
            "timesteps has the wrong type; expected a list of numbers; found "
        )


def test_all_problems_are_said_at_once() -> None:
    message = refusal(seed=-2, fps="24", tint=3)
    for problem in ("seed is out of range", "fps has the wrong type", "unknown option 'tint'"):
        assert problem in message


@given(st.integers(1, 10_000), st.floats(-3e38, 3e38), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_numbers_of_python_and_numpy(steps: int, scale: float, boundary: float, seed: int) -> None:
    given = {"prompt": "a", "num_steps": steps, "guidance_scale": scale, "boundary": boundary, "seed": seed}
    plain = read_request(given.items(), Request)
    assert plain == Request(**given)
    arrays = {
        **given,
        "num_steps": np.int64(steps),
        "boundary": np.float64(boundary),
        "seed": np.uint64(seed),
    }
    assert read_request(arrays.items(), Request) == plain
    whole = read_request({"prompt": "a", "guidance_scale": steps}.items(), Request)
    assert type(whole.guidance_scale) is float and whole.guidance_scale == steps


def test_a_size_is_a_text_or_a_pair() -> None:
    for size in ("832x480", (832, 480)):
        assert read_request({"prompt": "a", "size": size}.items(), Request).size == "832x480"


def test_file_names() -> None:
    for name in (row.name for row in rows() if row.name in MEDIA_KINDS):
        for bad in ("", "a\0.png", "\ud800.png"):
            value = ["r.png", bad] if name == "reference_image" else bad
            assert refusal(**{name: value}).startswith(f"{name} is no file name; found ")


# What derives from the rows.


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ((np.int32(64), 32), (64, 32)),
        ([np.float64(1.5), "a"], [1.5, "a"]),
        (Path("a/b"), "a/b"),
        ("text", "text"),
        (None, None),
        (7, 7),
    ],
)
def test_plain_values(value: Any, plain: Any) -> None:
    found = as_plain(value)
    assert found == plain
    assert type(found) is type(plain)
    if isinstance(plain, list | tuple):
        assert [type(one) for one in found] == [type(one) for one in plain]
