"""Sizes and numbers as people write them."""

from __future__ import annotations

import pytest

from helpers.refusals import refuses
from wanrun.request.written import parse_numbers, parse_size, parse_solver


@pytest.mark.parametrize(
    ("text", "size"),
    [("832x480", (832, 480)), ("832*480", (832, 480)), (" 1280X720 ", (1280, 720)), ("8x16", (8, 16))],
)
def test_sizes(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "832",
        "832x",
        "x480",
        "832x480x3",
        "0x480",
        "-8x8",
        "8.5x8",
        "832 480",
        "٨x٨",
        "999999x8",
        "8x8\n8x8",
    ],
)
def test_sizes_that_are_junk(text: str) -> None:
    with refuses("wrong_type", expected="WIDTHxHEIGHT", found=repr(text)):
        parse_size(text)


def test_numbers() -> None:
    assert parse_numbers("1000,937.5, 3e2") == [1000.0, 937.5, 300.0]
    for text in ("", "5,", "5;6", "5 6", "five"):
        with refuses("wrong_type", expected="commas", found=repr(text)):
            parse_numbers(text)


@pytest.mark.parametrize(
    ("text", "solver"),
    [
        ("UniPCMultistepScheduler", "unipc"),
        ("uni_pc", "unipc"),
        ("DPMSolverMultistepScheduler", "dpm++"),
        ("FlowMatchEulerDiscreteScheduler", "euler"),
        ("FlowMatchLCMScheduler", "lcm"),
        ("FlowMapEulerDiscreteScheduler", "flow-map"),
        ("SelfForcingFlowMatchScheduler", "self-forcing"),
        ("rcm-ode", "rcm-ode"),
        ("ddim", "ddim"),
    ],
)
def test_solvers(text: str, solver: str) -> None:
    assert parse_solver(text) == solver
