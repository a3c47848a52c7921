"""Flaws of videos: drawn ones have none, and each damage is seen, though the caption's facts hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from tinywan.captions import caption, read_caption
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, coverage, draw
from tinywan.judge import judge
from tinywan.scenes import random_scene
from tinywan.vocabulary import COLOURS, GROUNDS

CAPTION = "a red ball moves to the right over grey ground"

Damage = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def stained(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half the ground has another one's colour."""
    other = np.where(np.arange(HEIGHT)[:, None, None] < HEIGHT // 2, GROUNDS["grey"], GROUNDS["brown"])
    return np.where(video == GROUNDS["grey"], other, video)


def flickering(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return video + rng.normal(0, 6, video.shape)


def with_an_arm(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A box of the ball's colour is drawn behind it."""
    melted = video.astype(float)
    for frame in melted:
        rows, columns = np.nonzero(frame[..., 0] > 160)
        x, y = (columns.mean() + 0.5 - WIDTH / 2) / HEIGHT, (rows.mean() + 0.5 - HEIGHT / 2) / HEIGHT
        arm = coverage("box", x, y + 0.22, 0.12, HEIGHT, WIDTH)[..., None]
        frame += arm * (np.asarray(COLOURS["red"]) - frame)
    return melted


def shaking(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every frame is up to 6 pixels higher or lower."""
    return np.stack([np.roll(frame, rng.integers(-6, 7), 0) for frame in video])


DAMAGES: Mapping[str, tuple[Damage, set[str]]] = {
    "stained": (stained, {"stains"}),
    "flickering": (flickering, {"flicker"}),
    "with an arm": (with_an_arm, {"outline"}),
    "shaking": (shaking, {"jerk"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_flaw_is_seen_where_the_facts_hold(damage: str) -> None:
    rng = np.random.default_rng(1)
    video = draw(read_caption(CAPTION), FRAMES, HEIGHT, WIDTH, rng)
    damaged, names = DAMAGES[damage]
    made = np.clip(np.rint(damaged(video, rng)), 0, 255).astype(np.uint8)
    verdict = judge(made, CAPTION)
    assert verdict.score == 1
    assert {flaw.name for flaw in verdict.badly_drawn} == names


@pytest.mark.slow
def test_drawn_videos_have_none() -> None:
    """Less than half of what is taken of a model's."""
    rng = np.random.default_rng(2)
    for index in range(12):
        scene = random_scene(rng, held_out=index % 2 == 0)
        verdict = judge(draw(scene, FRAMES, HEIGHT, WIDTH, rng), caption(scene))
        assert max(flaw.value / flaw.most for flaw in verdict.flaws) < 0.5, scene


def test_what_cannot_be_measured_is_a_flaw() -> None:
    """In noise no thing is found, and one frame does not show whether it flickers."""
    noise = np.random.default_rng(3).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    assert {flaw.name for flaw in judge(noise, CAPTION).badly_drawn} >= {"outline", "jerk"}
    one = draw(read_caption(CAPTION), 1, HEIGHT, WIDTH, np.random.default_rng(4))
    assert {flaw.name for flaw in judge(one, CAPTION).badly_drawn} == {"flicker"}
