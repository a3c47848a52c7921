"""Contact sheets, and the commands that draw, show and judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tinywan.__main__ import main
from tinywan.contact_sheet import MARGIN, contact_sheet

CAPTION = "a red ball rolls to the right over green ground"


def test_frames_are_in_a_row_from_the_first_to_the_last() -> None:
    levels = np.arange(17, dtype=np.uint8) * 10
    frames = np.broadcast_to(levels[:, None, None, None], (17, 64, 96, 3))
    sheet = np.asarray(contact_sheet(frames, "grey"))
    middles = [sheet[MARGIN + 64, MARGIN + 96 + index * (192 + MARGIN), 0] for index in range(6)]
    assert middles == [0, 30, 60, 100, 130, 160]
    assert sheet.shape == (128 + 3 * MARGIN + 20, 6 * (192 + MARGIN) + MARGIN, 3)
    assert sheet[-25:].min() < 100  # the text is there


@pytest.mark.slow
def test_a_short_video_has_fewer_frames_and_a_long_text_is_cut() -> None:
    sheet = contact_sheet(np.zeros((1, 64, 96, 3), np.uint8), "word " * 200)
    assert sheet.size[0] == 192 + 2 * MARGIN


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_what_is_drawn_is_shown_and_judged(tmp_path: Path) -> None:
    video, sheet = tmp_path / "drawn.npy", tmp_path / "sheet.png"
    assert run("draw", CAPTION, "--output", str(video)) == (0, "")
    assert np.load(video).shape == (17, 64, 96, 3)
    code, text = run("show", str(video), "--prompt", CAPTION, "--sheet", str(sheet), "--at-least", "1")
    assert code == 0
    score = text.partition("score: 1.00 ")[2].splitlines()[0]
    assert score.count(" yes") == 4 and "ball" in score and "right" in score
    with Image.open(sheet) as image:
        assert image.size[0] > 1000


def test_a_wrong_video_fails(tmp_path: Path) -> None:
    video, sheet = tmp_path / "drawn.npy", tmp_path / "sheet.png"
    run("draw", CAPTION.replace("right", "left"), "--output", str(video))
    code, text = run("show", str(video), "--prompt", CAPTION, "--sheet", str(sheet), "--at-least", "0.9")
    assert code == 1
    assert "red right NO" in text
    assert text.endswith("the score is 0.75; expected at least 0.90\n")


@pytest.mark.slow
def test_a_badly_drawn_video_fails_though_its_score_is_1(tmp_path: Path) -> None:
    video, sheet = tmp_path / "drawn.npy", tmp_path / "sheet.png"
    run("draw", CAPTION, "--output", str(video))
    noise = np.random.default_rng(0).integers(-9, 10, (17, 64, 96, 3))
    np.save(video, np.clip(np.load(video) + noise, 0, 255).astype(np.uint8))
    arguments = ("show", str(video), "--prompt", CAPTION, "--sheet", str(sheet), "--at-least")
    assert run(*arguments, "0")[0] == 0
    code, text = run(*arguments, "1")
    assert code == 1
    assert "1.00" in text and "FLICKER" in text


@pytest.mark.parametrize("option", [[], ["--at-least", "0.9"]])
def test_a_prompt_that_is_no_caption_is_not_judged(option: list[str], tmp_path: Path) -> None:
    video, sheet = tmp_path / "drawn.npy", tmp_path / "sheet.png"
    run("draw", CAPTION, "--output", str(video))
    code, text = run("show", str(video), "--prompt", "a cat", "--sheet", str(sheet), *option)
    assert code == int(option != [])
    assert "not judged: " in text and "'a cat'" in text
    assert ("at least 0.90" in text) == (option != [])
    assert ": cat; " in text and "docs/demo.md" in text
    assert sheet.exists()
    code, text = run("show", str(video), "--prompt", "a cat", "--sheet", str(sheet), "--no-score")
    assert (code, text) == (0, f"contact sheet: {sheet}\n")


def test_a_drawing_needs_a_caption(tmp_path: Path) -> None:
    code, text = run("draw", "a cat", "--output", str(tmp_path / "cat.png"))
    assert code == 2
    assert "'a cat'" in text
    assert not (tmp_path / "cat.png").exists()
