"""The prompts that steps are chosen by, and those that judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_pipeline import write_lines
from wanbuild.calibrate.prompts import PROMPTS, read_prompts
from wanrun.errors import UsageError


def test_every_third_prompt_judges_with_two_seeds(tmp_path: Path) -> None:
    lines = [{"prompt": f"fox {i}", "negative_prompt": "n"} for i in range(7)]
    file = write_lines(tmp_path / "p.jsonl", *lines)
    found = read_prompts(file)
    assert [line.prompt for line in found.chosen_by] == ["fox 0", "fox 1", "fox 3", "fox 4", "fox 6"]
    assert [line.prompt for line in found.held_out] == ["fox 2", "fox 2", "fox 5", "fox 5"]
    seeds = [line.seed for line in (*found.chosen_by, *found.held_out)]
    assert len(set(seeds)) == 9 and all(line.negative_prompt == "n" for line in found.held_out)
    own = read_prompts(None)
    assert len(own.chosen_by) + len(own.held_out) // 2 == len(PROMPTS) == len(set(PROMPTS))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a", "steps": 3}, "p.jsonl:2: steps has no effect on a calibration; leave it out"),
        ({"prompt": "a", "size": "64x64"}, "size has no effect"),
        ({"prompt": "a", "schedule": "x"}, "schedule has no effect"),
        ({"prompt": 3}, "p.jsonl:2: prompt has the wrong type"),
    ],
)
def test_what_a_calibration_decides(line: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, line, {"prompt": "b"}))


def test_too_few(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few prompts to calibrate by; expected 3 or more; found 2"):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}))
