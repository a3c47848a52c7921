"""The prompts that steps are chosen by, and those that judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_pipeline import write_lines
from helpers.refusals import refuses
from wanbuild.calibrate.prompt_sets import PROMPTS, read_prompts
from wanrun.codes import ErrorCode


def test_prompts_go_into_three_sets(tmp_path: Path) -> None:
    """In turn; one with another seed goes where that prompt is."""
    texts = [f"fox {i}" for i in (0, 1, 2, 3, 1, 4, 5, 6)]
    lines = [{"prompt": text, "negative_prompt": "n", "seed": seed} for seed, text in enumerate(texts)]
    found = read_prompts(write_lines(tmp_path / "p.jsonl", *lines))
    assert [line.prompt for line in found.chosen_by] == ["fox 0", "fox 3", "fox 6"]
    assert [line.prompt for line in found.decided_by] == ["fox 1", "fox 1", "fox 4"]
    assert [line.prompt for line in found.reported_by] == ["fox 2", "fox 5"]
    assert len({line.seed for line in found.lines()}) == len(lines)
    assert all(line.negative_prompt == "n" for line in found.lines())


def test_few_prompts_that_judge_are_doubted(tmp_path: Path) -> None:
    own = read_prompts(None)
    assert len(own.lines()) == len(PROMPTS) == len(set(PROMPTS)) and not [*own.doubts()]
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    for some in (lines[:-1], [*lines[:-1], lines[-4]]):  # two seeds of a prompt are one
        assert len([*read_prompts(write_lines(tmp_path / "p.jsonl", *some)).doubts()]) == 1


@pytest.mark.parametrize(
    ("code", "key", "line"),
    [
        ("no_effect", "steps", {"prompt": "a", "steps": 3}),
        ("no_effect", "size", {"prompt": "a", "size": "64x64"}),
        ("no_effect", "schedule", {"prompt": "a", "schedule": "x"}),
        ("no_effect", "guidance_end", {"prompt": "a", "guidance_end": 0.5}),
        ("wrong_type", "prompt", {"prompt": 3}),
    ],
)
def test_what_a_calibration_decides(
    code: ErrorCode, key: str, line: dict[str, object], tmp_path: Path
) -> None:
    with refuses(code, what=f"p.jsonl:2: {key} "):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, line, {"prompt": "b"}))


def test_too_few(tmp_path: Path) -> None:
    with refuses("out_of_range", expected=3, found=2):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}))
