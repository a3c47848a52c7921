"""Options of other tools: each means an option that there is, or a line that says what to do."""

from __future__ import annotations

import pytest

from helpers.refusals import check_refusal, refuses
from wancli.aliases import command_meant, no_option
from wanrun.request.elsewhere import ELSEWHERE
from wanrun.request.lora import LoraChoice
from wanrun.request.prompts_file import Line
from wanrun.request.reading import read_request
from wanrun.request.schema import aliases, rows

NAMES = {row.name for row in rows(Line)}
ALIASES = aliases(Line)


def test_no_name_means_two_things() -> None:
    every = [*NAMES, *(other for row in rows(Line) for other in row.also), *ELSEWHERE]
    assert len(every) == len(set(every))
    assert {"num_inference_steps", "save_file"} < ALIASES.keys()
    assert set(ALIASES.values()) <= NAMES


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_a_request_understands_an_alias(alias: str, name: str) -> None:
    value = {"seed": 3, "num_frames": 5, "num_steps": 4, "num_videos": 2, "size": "96x64", "solver": "euler"}
    value |= {"steps_high": 2, "steps_low": 2, "clips": 2, "window_frames": 9, "window_overlap": 4}
    number = {"boundary": 0.5, "guidance_scale": 2.0, "flow_shift": 3.0, "fps": 24.0, "strength": 0.5}
    number |= {"skip_layers": (1, 2), "skip_scale": 2.0, "skip_start": 0.1, "skip_end": 0.3}
    given = {**value, **number, "lora": (LoraChoice(name="a"),)}.get(name, "a.png")
    request = read_request([("prompt", "a fox"), (alias, given)], Line)
    assert getattr(request, name) == given


@pytest.mark.parametrize(("written", "meant"), [("UniPCMultistepScheduler", "unipc"), ("Euler", "euler")])
def test_a_solver_has_the_names_of_other_tools(written: str, meant: str) -> None:
    assert read_request([("prompt", "a fox"), ("scheduler", written)], Line).solver == meant


def test_an_option_by_two_names_is_given_twice() -> None:
    for names in (("num_steps", "num_inference_steps"), ("steps", "sample_steps")):
        with refuses("conflict", fields=("num_steps",)):
            read_request([("prompt", "a fox"), *((name, 4) for name in names)], Line)


@pytest.mark.parametrize(
    ("written", "meant", "remedy"),
    [
        ("--artefact", "--artefact", "use --artifact"),
        ("--sise", "--sise", "see wanbuild convert --help"),  # near one of another command alone
        ("--size", "--size", "wanbuild compile and wanbuild plan have it"),
        ("--scheduler", "--solver", "pass --default NAME=VALUE"),
        ("--tp", "--tp", "see wanbuild convert --help"),
        ("--quantized", "--quantized", "pass --quantise int8, or float8: see wanbuild convert --help"),
    ],
)
def test_what_is_told_of_an_option(written: str, meant: str, remedy: str) -> None:
    others = {"wanbuild compile": ["--size"], "wanbuild plan": ["--size"]}
    error = no_option("wanbuild convert", written, meant, ["--artifact", "--vae"], others)
    check_refusal(error, "unknown_parameter", what=written)
    assert error.remedy == remedy


def test_a_word_is_a_command_if_it_is_known_or_near() -> None:
    assert command_meant("wanrun", "serv", ["serve"]) == "use wanrun serve"
    assert command_meant("wanrun", "videos", ["serve"]) is None


def test_a_random_seed_is_another_one_each_time() -> None:
    seeds = {read_request([("prompt", "a fox"), ("seed", one)], Line).seed for one in ("random", -1) * 2}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)
