"""The fastest settings for a chip: each is faster than the one before, and asked for as it says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from wanbuild import cli
from wanbuild.build_options import PlanRequest
from wanbuild.plan import best
from wanbuild.plan.best import best_settings, settings
from wanbuild.targets.chips import CHIPS
from wanrun.errors import UsageError


def planned(monkeypatch: pytest.MonkeyPatch, seconds: list[float | None]) -> tuple[list[Any], list[Any]]:
    """Settings for v7x-8 where plans take these seconds, or are refused; and the requests with subjects."""
    asked: list[Any] = []
    left = iter(seconds)

    def make_plan(subject: Any, request: PlanRequest) -> Any:
        asked.append((subject, request))
        if (video := next(left)) is None:
            raise UsageError("mismatch", "it does not fit")
        return SimpleNamespace(chosen=SimpleNamespace(video=video))

    monkeypatch.setattr(best, "make_plan", make_plan)
    found = best_settings(lambda quantise: quantise and quantise.form, PlanRequest("v7x-8", {"frames": 81}))  # type: ignore[arg-type, return-value]
    return [one.setting.given.split(",")[0] for one in found], asked


def test_settings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = planned(monkeypatch, [4, 3, 2, 1])
    assert names == ["as published", "--vae-dtype bfloat16", "--quantise float8", "--lora FILE"]
    assert [subject for subject, _ in asked] == [None, None, "float8", "float8"]
    assert [request.target for _, request in asked] == ["v7x-8", "v7x-8", "v7x-w8a8-8", "v7x-w8a8-8"]
    last = asked[-1][1]
    assert last.choices == {"frames": 81, "vae_dtype": "bfloat16", "guidance": False} and last.steps == 4


def test_what_is_slower_or_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = planned(monkeypatch, [4, 5, None, 1])
    assert names == ["as published", "--lora FILE"]
    assert asked[-1][1].target == "v7x-8" and "vae_dtype" not in asked[-1][1].choices
    with pytest.raises(UsageError, match="does not fit"):
        planned(monkeypatch, [None] * 4)


def test_products_of_eight_bits_are_a_setting_where_they_are_faster() -> None:
    dtypes = {name: {one.quantise for one in settings(chip)} - {None} for name, chip in CHIPS.items()}
    named = [one.given for one in settings(CHIPS["v6e"].in_eight_bits())]
    assert named == [one.given for one in settings(CHIPS["v6e"])]
    assert dtypes["v4"] == set() and dtypes["v6e"] == {"int8"} and dtypes["v7x"] == {"float8"}


@pytest.mark.thorough
def test_the_command() -> None:
    arguments = ["plan", "wan2.1-t2v-1.3b", "--target", "v6e-8", "--best"]
    lines = CliRunner().invoke(cli.wanbuild, arguments, catch_exceptions=False).output.splitlines()
    assert lines[0].startswith("wan2.1-t2v-1.3b, 832x480x81") and max(map(len, lines)) <= 110
    assert "--target v6e-w8a8" in lines[5]
    output = CliRunner().invoke(cli.wanbuild, [*arguments, "--json"], catch_exceptions=False).output
    seconds = [row["video_seconds"] for row in json.loads(output)]
    assert len(seconds) == 4 and seconds == sorted(seconds, reverse=True)
