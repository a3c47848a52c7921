"""The judge of videos, on drawn ones: clean, blurred and noisy, with right and wrong captions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tinywan.captions import caption
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.judge import Verdict, judge, look
from tinywan.scenes import Scene, Thing, random_scene
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES


def unchanged(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return video


def blurred(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mean over 3x3 pixels, twice."""
    values = video.astype(float)
    for _ in range(2):
        wide = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
        values = sum(wide[:, i : i + HEIGHT, j : j + WIDTH] for i in range(3) for j in range(3)) / 9
    return values.round().astype(np.uint8)


def noisy(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.clip(video + rng.normal(0, 15, video.shape), 0, 255).astype(np.uint8)


def verdicts(scenes: list[Scene], change: Callable[..., np.ndarray], seed: int) -> list[Verdict]:
    rng = np.random.default_rng(seed)
    return [
        judge(change(draw(scene, FRAMES, HEIGHT, WIDTH, rng), rng), caption(scene, rng)) for scene in scenes
    ]


def every_look() -> list[Scene]:
    """Every shape with every motion, and every colour on every ground it can be on."""
    rng = np.random.default_rng(1)
    grounds, colours = list(GROUNDS), list(COLOURS)
    looks = [(shape, motion) for shape in SHAPES for motion in MOTIONS]
    return [
        Scene(
            (Thing(colours[index % len(colours)], shape, motion),),
            grounds[index % len(grounds)],
            str(rng.choice(["plain", "striped", "checked", "speckled"])),
        )
        for index, (shape, motion) in enumerate(looks)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("change", [unchanged, blurred, noisy])
def test_drawn_videos(change: Callable[..., np.ndarray]) -> None:
    rng = np.random.default_rng(2)
    scenes = every_look() + [random_scene(rng, held_out=index % 2 == 0) for index in range(16)]
    found = verdicts(scenes if change is unchanged else scenes[::2], change, 3)
    facts = [holds for verdict in found for holds in verdict.facts.values()]
    assert np.mean(facts) >= 0.99
    assert np.mean([verdict.score == 1 for verdict in found]) >= 0.97


@pytest.mark.thorough
def test_wrong_captions() -> None:
    """One word is changed, and the fact of that word alone must not hold."""
    rng = np.random.default_rng(4)
    for scene in every_look():
        thing = scene.things[0]
        video = draw(scene, FRAMES, HEIGHT, WIDTH, rng)

        def other(names: object, own: str) -> str:
            return str(rng.choice([name for name in list(names) if name != own]))  # type: ignore[call-overload]

        for field, names in (("shape", SHAPES), ("motion", MOTIONS)):
            wrong = replace(thing, **{field: other(names, getattr(thing, field))})
            verdict = judge(video, caption(replace(scene, things=(wrong,)), rng))
            failed = [fact for fact, holds in verdict.facts.items() if not holds]
            assert failed == [f"{thing.colour} {getattr(wrong, field)}"], (scene, wrong)
            assert verdict.score == pytest.approx(3 / 4)
            assert verdict.motion == (0 if field == "motion" else 1)
        wrong = replace(thing, colour=other(COLOURS, thing.colour))
        assert judge(video, caption(replace(scene, things=(wrong,)), rng)).score == pytest.approx(1 / 4)
        ground = other(GROUNDS, scene.ground)
        failed = judge(video, caption(replace(scene, ground=ground), rng)).facts
        assert [fact for fact, holds in failed.items() if not holds] == [f"{ground} ground"]


def test_noise_shows_nothing() -> None:
    rng = np.random.default_rng(6)
    video = rng.integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    assert look(video) == {}


def test_what_stands_still_does_not_move() -> None:
    scene = Scene((Thing("red", "ball", "right"),), "grey", "plain")
    frame = draw(scene, 1, HEIGHT, WIDTH, np.random.default_rng(7))
    seen = look(np.repeat(frame, FRAMES, 0))
    assert {name: (one.shape, one.motion) for name, one in seen.items()} == {"red": ("ball", None)}


@pytest.mark.slow
def test_a_video_backwards_goes_the_other_way() -> None:
    rng = np.random.default_rng(8)
    opposite = {
        "right": "left",
        "left": "right",
        "up": "down",
        "down": "up",
        "grow": "shrink",
        "shrink": "grow",
    }
    for motion, other in opposite.items():
        video = draw(Scene((Thing("blue", "box", motion),), "brown", "plain"), FRAMES, HEIGHT, WIDTH, rng)
        assert look(video[::-1])["blue"].motion == other


@pytest.mark.thorough
def test_ways_without_a_name_show_no_motion() -> None:
    """So no training video shows, unnamed, what is held out."""
    rng = np.random.default_rng(9)
    for _ in range(40):
        scene = random_scene(rng, nameless=1.0)
        assert not scene.held_out
        seen = look(draw(scene, FRAMES, HEIGHT, WIDTH, rng), scene)
        assert {name: (one.shape, one.motion) for name, one in seen.items()} == {
            thing.colour: (thing.shape, None) for thing in scene.things
        }
