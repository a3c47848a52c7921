"""A request is read from values of every kind, and each problem is named; the names of other tools too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wanrun
from helpers.refusals import check_refusal, refuses
from wanrun.errors import UsageError, WanError
from wanrun.media.inputs import MEDIA_KINDS
from wanrun.request.elsewhere import ELSEWHERE, OF_PYTHON, by_name, nearest
from wanrun.request.lora import LoraChoice
from wanrun.request.prompts_file import Line
from wanrun.request.reading import as_plain, read_request
from wanrun.request.request import Request
from wanrun.request.resolve import request_of
from wanrun.request.schema import aliases, rows
from wanrun.request.written import parse_numbers, parse_size, parse_solver

FILES = tuple(row.name for row in rows() if row.name in MEDIA_KINDS)


def read(**options: Any) -> Request:
    return read_request({"prompt": "a fox", **options}.items(), Request)


def refusal(**options: Any) -> WanError:
    with pytest.raises(UsageError) as caught:
        read(**options)
    assert set(caught.value.fields) <= options.keys() | {row.name for row in rows()}
    return caught.value


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
        error = refusal(**{name: value})
        check_refusal(error, "out_of_range", what=name, expected=expected)
        assert error.fields == (name,) and error.found is not None


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("mode", one) for one in ("swap", "")),
        *(("loop", one) for one in ("while", "")),
        ("solver", "no-such"),
        *(
            (name, ["r.png", bad] if name == "reference_image" else bad)
            for name in FILES
            for bad in ("", "a\0.png", "\ud800.png")
        ),
    ],
)
def test_neither_a_choice_nor_the_name_of_a_file(name: str, bad: Any) -> None:
    error = refusal(**{name: bad})
    check_refusal(error, "invalid_value", what=name)
    assert error.fields == (name,)


def test_wrong_types() -> None:
    for row in rows():
        for value in (True, object(), b"a", *([] if row.record else [{"a": 1}])):
            check_refusal(refusal(**{row.name: value}), "wrong_type", what=row.name, expected=row.kind)


def test_several_numbers_and_a_size() -> None:
    for value in ([1000, 937.5], (1000.0, 937.5), np.array([1000, 937.5])):
        found = read(timesteps=value).timesteps
        assert found == (1000.0, 937.5) and all(type(item) is float for item in found)
    for wrong in ("1000,937.5", 1000.0, [1000, True], ["1000"], [[1000]], np.array([[1000.0]])):
        check_refusal(refusal(timesteps=wrong), "wrong_type", what="timesteps", expected="list of numbers")
    assert read(size="832x480").size == read(size=(832, 480)).size == "832x480"


def test_all_problems_are_said_at_once() -> None:
    error = refusal(seed=-2, fps="24", tint=3)
    assert all(problem in str(error) for problem in ("seed is out", "fps has", "'tint'"))
    problems: dict[str, Any] = {"seed": -2, "fps": "24"}
    for problems["fps"], code in (("24", "invalid_value"), (0, "out_of_range")):
        error = refusal(**problems)
        assert error.code == code and set(error.fields) == problems.keys()


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
    ],
)
def test_plain_values(value: Any, plain: Any) -> None:
    found = as_plain(value)
    assert found == plain and type(found) is type(plain)
    if isinstance(plain, list | tuple):
        assert [type(one) for one in found] == [type(one) for one in plain]


# Texts as people write them.


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "832x480", (832, 480)),
        (parse_size, "832*480", (832, 480)),
        (parse_size, " 1280X720 ", (1280, 720)),
        (parse_numbers, "1000,937.5, 3e2", [1000.0, 937.5, 300.0]),
        (parse_solver, "UniPCMultistepScheduler", "unipc"),
        (parse_solver, "uni_pc", "unipc"),
        (parse_solver, "DPMSolverMultistepScheduler", "dpm++"),
        (parse_solver, "FlowMatchEulerDiscreteScheduler", "euler"),
        (parse_solver, "FlowMatchLCMScheduler", "lcm"),
        (parse_solver, "FlowMapEulerDiscreteScheduler", "flow-map"),
        (parse_solver, "SelfForcingFlowMatchScheduler", "self-forcing"),
        (parse_solver, "rcm-ode", "rcm-ode"),
        (parse_solver, "ddim", "ddim"),
    ],
)
def test_what_is_written_for_a_value(parse: Callable[[str], Any], text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "expected", "junk"),
    [
        (
            parse_size,
            "WIDTHxHEIGHT",
            ["", "832", "832x", "x480", "832x480x3", "0x480", "-8x8", "8.5x8", "832 480", "٨x٨", "999999x8"],
        ),
        (parse_size, "WIDTHxHEIGHT", ["8x8\n8x8"]),
        (parse_numbers, "commas", ["", "5,", "5;6", "5 6", "five"]),
    ],
)
def test_texts_that_are_junk(parse: Callable[[str], Any], expected: str, junk: list[str]) -> None:
    for text in junk:
        with refuses("wrong_type", expected=expected, found=repr(text)):
            parse(text)


# Names of other tools.


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("height", ("size",)),
        ("hieght", ("size",)),
        ("generator", ("seed",)),
        ("guidance_scale_high", ("guidance_scale", "guidance_scale_2")),
        ("infer_step", ("num_steps",)),
        ("nag", ("nag_scale",)),
        ("window", ("window_frames",)),
        ("clip", ("clips",)),
        ("torch_dtype", ()),
    ],
)
def test_a_request_names_what_to_use(name: str, fields: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as raised:
        read_request([("prompt", "a fox"), (name, 1)], Line)
    assert raised.value.fields == fields and raised.value.remedy is not None


@pytest.mark.parametrize("name", [*OF_PYTHON, "memory", "target"])
def test_a_keyword_of_python_names_what_to_use(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        request_of({"prompt": "a fox", name: 1})
    assert raised.value.remedy is not None and raised.value.expected is None


def test_a_name_that_is_like_none_has_no_remedy() -> None:
    assert refusal(tint=1).remedy is None
    assert nearest("denoise", ["video", "noise_seed"]) is None
    assert nearest("negative_promt", ["negative_prompt", "prompt"]) == "negative_prompt"


@pytest.mark.parametrize(
    ("there", "name"),
    [
        (wanrun, "WanPipeline"),
        (object.__new__(wanrun.Pipeline), "to"),
        (object.__new__(wanrun.Pipeline), "load_lora_weights"),
        (object.__new__(wanrun.Pipeline), "enable_model_cpu_offload"),
        (object.__new__(wanrun.Result), "videos"),
    ],
)
def test_an_attribute_of_diffusers_names_what_to_use(there: object, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'; "):
        getattr(there, name)
    assert not hasattr(there, "some_other")
    with pytest.raises(TypeError, match="generate"):
        object.__new__(wanrun.Pipeline)("a fox")  # type: ignore[operator]


def test_a_name_has_one_row() -> None:
    assert by_name({"pass --a": "b c"}) == {"b": "pass --a", "c": "pass --a"}
    with pytest.raises(ValueError, match="b"):
        by_name({"pass --a": "b c", "pass --d": "b"})
    assert all(name.isidentifier() for name in ELSEWHERE)


ALIASES = aliases(Line)


def test_no_name_means_two_things() -> None:
    names = {row.name for row in rows(Line)}
    every = [*names, *(other for row in rows(Line) for other in row.also), *ELSEWHERE]
    assert len(every) == len(set(every))
    assert {"num_inference_steps", "save_file"} < ALIASES.keys() and set(ALIASES.values()) <= names


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_a_request_understands_an_alias(alias: str, name: str) -> None:
    value = {"seed": 3, "num_frames": 5, "num_steps": 4, "num_videos": 2, "size": "96x64", "solver": "euler"}
    value |= {"steps_high": 2, "steps_low": 2, "clips": 2, "window_frames": 9, "window_overlap": 4}
    number = {"boundary": 0.5, "guidance_scale": 2.0, "flow_shift": 3.0, "fps": 24.0, "strength": 0.5}
    number |= {"skip_layers": (1, 2), "skip_scale": 2.0, "skip_start": 0.1, "skip_end": 0.3}
    given = {**value, **number, "lora": (LoraChoice(name="a"),)}.get(name, "a.png")
    request = read_request([("prompt", "a fox"), (alias, given)], Line)
    assert getattr(request, name) == given


def test_an_option_by_two_names_is_given_twice() -> None:
    for names in (("num_steps", "num_inference_steps"), ("steps", "sample_steps")):
        with refuses("conflict", fields=("num_steps",)):
            read_request([("prompt", "a fox"), *((name, 4) for name in names)], Line)


def test_a_random_seed_is_another_one_each_time() -> None:
    seeds = {read_request([("prompt", "a fox"), ("seed", one)], Line).seed for one in ("random", -1) * 2}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)
