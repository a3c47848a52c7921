"""Captions are written from scenes and read back; contact sheets; the commands that draw, show and judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tinywan.__main__ import main
from tinywan.captions import CaptionError, caption, read_caption, unknown_words
from tinywan.contact_sheet import MARGIN, contact_sheet
from tinywan.endless import BLOCK, block_frames, centred, changed, draw_story, judge_blocks, random_story
from tinywan.scenes import Scene, Thing, fit, random_scene
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES, SIZES, TEXTURES


@pytest.mark.parametrize("held_out", [False, True])
def test_every_wording_is_read_back(held_out: bool) -> None:
    rng = np.random.default_rng(5)
    texts = set()
    for _ in range(400):
        scene = random_scene(rng, held_out)
        assert {thing.held_out for thing in scene.things} == {held_out} and fit(scene.things)
        text = caption(scene, rng)
        assert read_caption(text) == scene, text
        assert read_caption(caption(scene)) == scene
        texts.add(text)
    assert len(texts) > 350


def test_a_sentence_of_a_user() -> None:
    scene = read_caption("A red ball rolls to the right, over green ground.")
    assert scene == Scene((Thing("red", "ball", "right"),), "green", "plain")
    two = read_caption("On a striped grey ground, a small blue star circles while a white disc gets bigger")
    assert two.things == (Thing("blue", "star", "circle", "small"), Thing("white", "ball", "grow"))
    assert (two.ground, two.texture) == ("grey", "striped")


def test_left_to_right_is_right() -> None:
    thing = read_caption("a red box travels from left to right over black ground").things[0]
    assert thing.motion == "right"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a red ball moves up", "no ground in"),
        ("a red ball moves up over pink ground", "no ground in"),
        ("a red ball moves up over furry green ground", "no such ground as 'furry'"),
        ("a pink ball moves up over green ground", "no colour in"),
        ("a red cat moves up over green ground", "no shape in"),
        ("a red ball sleeps over green ground", "no motion in"),
    ],
)
def test_what_is_no_caption(text: str, message: str) -> None:
    with pytest.raises(CaptionError, match=message):
        read_caption(text)


def test_words_that_no_caption_has() -> None:
    caption = "A fluffy red ball rolls to the right, over GREEN ground; fluffy 3 Füchse"
    assert unknown_words(caption) == ["fluffy", "3", "füchse"]


def test_the_page_of_the_demo_has_every_word() -> None:
    page = (Path(__file__).parents[2] / "docs" / "demo.md").read_text(encoding="utf-8")
    for table in (COLOURS, GROUNDS, TEXTURES, SIZES, *SHAPES.values(), *MOTIONS.values()):
        assert [phrase for phrase in table if f" {phrase}," not in page and f" {phrase} |" not in page] == []


# Videos without end: what is drawn is what the captions of its blocks say, wherever a thing is.


def _scene(motion: str, colour: str = "red") -> Scene:
    return Scene((Thing(colour, "ball", motion),), "grey", "plain")


@pytest.mark.slow
def test_every_block_shows_its_caption() -> None:
    """The thing goes out at one side, comes in at the other, and turns at once."""
    scenes = [_scene("right")] * 3 + [_scene("up", "blue")] * 2 + [_scene("circle"), _scene("shrink")]
    frames = draw_story(scenes, np.random.default_rng(1))
    assert len(frames) == sum(block_frames(block) for block in range(len(scenes)))
    assert len(frames) == 4 * (BLOCK * len(scenes)) - 3
    verdicts = list(judge_blocks(frames, [caption(scene) for scene in scenes]))
    assert [verdict.score for verdict in verdicts] == [1.0] * len(scenes)
    assert not [verdict.badly_drawn for verdict in verdicts if verdict.badly_drawn]


def test_a_thing_at_the_edge_is_brought_to_the_middle() -> None:
    video = np.full((3, 64, 96, 3), 92, np.uint8)
    video[:, :8], video[:, -8:] = (222, 44, 40), (222, 44, 40)
    turned = centred(video, "red")
    assert turned[1, 24:40, :, 0].min() == 222
    assert turned[1, :22, :, 0].max() == 92


def test_a_change_changes_something() -> None:
    rng = np.random.default_rng(2)
    scenes, turns = random_story(rng, 6, 2)
    assert turns[0] == 0 and turns[-1] == 2 and sorted(turns) == turns
    assert all(changed(scene, rng) != scene for scene in scenes)


# Contact sheets, and the commands that draw, show and judge.


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


@pytest.mark.slow
def test_what_is_drawn_is_shown_and_judged(tmp_path: Path) -> None:
    """A right video, a wrong one, and one that is badly drawn though its score is 1."""
    video, sheet = tmp_path / "drawn.npy", tmp_path / "sheet.png"
    show = ("show", str(video), "--prompt", CAPTION, "--sheet", str(sheet), "--at-least")
    assert run("draw", CAPTION, "--output", str(video)) == (0, "")
    drawn = np.load(video)
    assert drawn.shape == (17, 64, 96, 3)
    code, text = run(*show, "1")
    assert code == 0
    score = text.partition("score: 1.00 ")[2].splitlines()[0]
    assert score.count(" yes") == 4 and "ball" in score and "right" in score
    with Image.open(sheet) as image:
        assert image.size[0] > 1000

    noise = np.random.default_rng(0).integers(-9, 10, (17, 64, 96, 3))
    np.save(video, np.clip(drawn + noise, 0, 255).astype(np.uint8))
    assert run(*show, "0")[0] == 0
    code, text = run(*show, "1")
    assert code == 1 and "1.00" in text and "FLICKER" in text

    run("draw", CAPTION.replace("right", "left"), "--output", str(video))
    code, text = run(*show, "0.9")
    assert code == 1 and "red right NO" in text
    assert text.endswith("the score is 0.75; expected at least 0.90\n")


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
