"""Captions are written from scenes, and read back to the same scenes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinywan.captions import CaptionError, caption, read_caption, unknown_words
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
