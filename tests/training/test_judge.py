"""The judge of videos: facts and flaws of drawn ones, clean and damaged; the distances of the yardstick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from tinywan.captions import caption, read_caption
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, coverage, draw
from tinywan.judge import Verdict, judge, look
from tinywan.scenes import Scene, Thing, random_scene
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES
from tinywan.yardstick import captions, gmsd, psnr, ssim


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


# Flaws of videos: drawn ones have none, and each damage is seen, though the caption's facts hold.


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


# The captions and distances of the yardstick.


VIDEO = draw(read_caption("a red star grows on checked grey ground"), 5, 64, 96, np.random.default_rng(0))


@pytest.mark.thorough
def test_captions_are_fixed_and_mixed() -> None:
    texts = captions()
    assert texts == captions()
    assert len({text for text, _ in texts}) == 64
    assert all(read_caption(text).held_out == new for text, new in texts)
    for part in (texts[:16], texts):
        assert 0.5 <= sum(new for _, new in part) / len(part) <= 0.6


def test_equal_videos_have_no_distance() -> None:
    assert (psnr(VIDEO, VIDEO), gmsd(VIDEO, VIDEO)) == (float("inf"), 0)
    assert ssim(VIDEO, VIDEO) == pytest.approx(1, abs=1e-12)


def test_psnr_of_a_known_error() -> None:
    found, expected = (np.full((2, 3), value, np.uint8) for value in (100, 110))
    assert psnr(found, expected) == pytest.approx(28.1308, abs=1e-4)


def test_ssim_of_flat_frames() -> None:
    """Without variance it is the term of the means alone."""
    flat = [np.full((1, 16, 16, 3), value, np.uint8) for value in (50, 100)]
    c1 = (0.01 * 255) ** 2
    assert ssim(*flat) == pytest.approx((2 * 50 * 100 + c1) / (50**2 + 100**2 + c1))


def test_distances_order_what_is_seen() -> None:
    """Brighter frames have a larger error than noisy ones, and all their edges."""
    rng = np.random.default_rng(1)
    noisy = np.clip(VIDEO + rng.normal(0, 6, VIDEO.shape), 0, 255).astype(np.uint8)
    noisier = np.clip(VIDEO + rng.normal(0, 25, VIDEO.shape), 0, 255).astype(np.uint8)
    moved = np.roll(VIDEO, 8, 2)
    assert gmsd(noisy, VIDEO) < 0.5 * min(gmsd(noisier, VIDEO), gmsd(moved, VIDEO))
    assert ssim(noisy, VIDEO) > ssim(noisier, VIDEO)
    brighter = np.clip(VIDEO.astype(int) + 12, 0, 255).astype(np.uint8)
    assert psnr(brighter, VIDEO) < psnr(noisy, VIDEO)
    assert gmsd(brighter, VIDEO) < gmsd(noisy, VIDEO)
