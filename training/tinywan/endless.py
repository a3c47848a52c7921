"""Videos without end: one thing goes on and on; where it leaves at one side, it comes in at the other.

A video is made of blocks, as a causal model makes it, and each block has its scene. Where a scene's motion,
size, colour, shape or ground is another than before, the thing turns, grows or changes at once. Nothing is
left to chance but where near the middle it begins, so a block follows from the one before it and its caption.
Plain NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinywan.captions import read_caption
from tinywan.drawing import HEIGHT, RADIUS, WIDTH, coverage, draw_ground
from tinywan.judge import Verdict, judge
from tinywan.scenes import Scene, Thing, random_scene
from tinywan.tracks import nearest
from tinywan.vocabulary import COLOURS, MOTIONS, SHAPES, SIZES

BLOCK = 3
"""Latent frames of a block."""

NEAR = 0.1
"""How far from the middle a thing begins at most, either way, in heights of a frame."""

SPEED = 2 / HEIGHT
"""Of a straight motion, in heights of a frame: one latent in a latent frame."""

ROUND = 14
"""Frames of a circle, and its radius in heights."""

ROUND_RADIUS = 0.11

GROWTH = 0.045
"""The most that the logarithm of a radius changes in a frame."""

GROWN = {"grow": 1.55, "shrink": 0.62}
"""The radius at which a motion ends, by the usual one."""

GOING_ON = ("right", "left", "up", "down", "circle")
"""Motions that have no end."""

_HEADINGS = {"right": 0.0, "down": math.pi / 2, "left": math.pi, "up": -math.pi / 2}


@dataclass
class State:
    """Where a thing is, how large and whither it goes.

    Args:
        x, y: its centre, from the middle in heights of a frame; the frame goes round.
        radius: of the ball of its area.
        heading: the angle of its way, if it is in a circle; else None.
    """

    x: float
    y: float
    radius: float
    heading: float | None = None

    def move(self, thing: Thing) -> None:
        """Moves it by a frame, as what it is now does."""
        change = math.log(aim(thing) / self.radius)
        self.radius *= math.exp(min(max(change, -GROWTH), GROWTH))
        if thing.motion == "circle":
            turn = 2 * math.pi / ROUND
            self.heading = 0.0 if self.heading is None else self.heading + turn
            self._go(self.heading, turn * ROUND_RADIUS)
            return
        self.heading = None
        if thing.motion in _HEADINGS:
            self._go(_HEADINGS[thing.motion], SPEED)

    def _go(self, heading: float, way: float) -> None:
        width = WIDTH / HEIGHT
        self.x = (self.x + way * math.cos(heading) + width / 2) % width - width / 2
        self.y = (self.y + way * math.sin(heading) + 0.5) % 1 - 0.5


def aim(thing: Thing) -> float:
    """Returns the radius that a thing comes to."""
    return RADIUS * SIZES.get(thing.size or "", 1.0) * GROWN.get(thing.motion or "", 1.0)


def block_frames(number: int) -> int:
    """Returns the frames of a block, counted from 0: the first latent frame is one frame, later ones four."""
    return 4 * BLOCK if number else 4 * BLOCK - 3


def random_story(rng: np.random.Generator, blocks: int, changes: int) -> tuple[list[Scene], list[int]]:
    """Draws the scenes of a video, and when they change.

    Returns:
        ``changes`` + 1 scenes, and of every block the number of its scene.
    """
    scenes = [_single(rng)]
    for _ in range(changes):
        scenes.append(changed(scenes[-1], rng))
    at = np.sort(rng.permutation(np.arange(1, blocks))[:changes])
    return scenes, [int(np.sum(at <= block)) for block in range(blocks)]


def changed(scene: Scene, rng: np.random.Generator) -> Scene:
    """Returns another scene: mostly another motion, sometimes another colour, shape, size or ground."""
    while True:
        (thing,) = scene.things
        other = _single(rng)
        (new,) = other.things
        thing = replace(
            thing,
            motion=new.motion if rng.random() < 0.8 else thing.motion,
            colour=new.colour if rng.random() < 0.2 else thing.colour,
            shape=new.shape if rng.random() < 0.2 else thing.shape,
            size=new.size if rng.random() < 0.2 else thing.size,
        )
        kept = scene if rng.random() < 0.8 else other
        found = replace(kept, things=(_sized(thing),))
        if found != scene:
            return found


def _single(rng: np.random.Generator) -> Scene:
    """Draws a scene of one thing, of any colour, shape and motion."""
    scene = random_scene(rng, most_things=1)
    colour, shape, motion = (str(rng.choice(list(words))) for words in (COLOURS, SHAPES, MOTIONS))
    return replace(scene, things=(_sized(Thing(colour, shape, motion, scene.things[0].size)),))


def _sized(thing: Thing) -> Thing:
    """Leaves out the size of what grows or shrinks: it has none."""
    return replace(thing, size=None) if thing.motion in GROWN else thing


def draw_story(scenes: Sequence[Scene], rng: np.random.Generator) -> np.ndarray:
    """Draws a video.

    Args:
        scenes: of every block, of one thing each.
        rng: chooses where it begins.

    Returns:
        uint8 (F, HEIGHT, WIDTH, 3).
    """
    (first,) = scenes[0].things
    x, y = rng.uniform(-NEAR, NEAR, 2)
    state = State(x, y, aim(replace(first, motion=None)))
    frames = []
    for number, scene in enumerate(scenes):
        (thing,) = scene.things
        ground = draw_ground(scene, HEIGHT, WIDTH, np.random.default_rng(0))
        for frame in range(block_frames(number)):
            if number or frame:
                state.move(thing)
            cover = _coverage(thing.shape, state)[..., None]
            frames.append(ground + cover * (np.asarray(COLOURS[thing.colour]) - ground))
    return np.asarray(np.clip(np.rint(frames), 0, 255).astype(np.uint8))


def _coverage(shape: str, state: State) -> np.ndarray:
    """Returns the share of every pixel that a thing covers; what leaves at one side is at the other too."""
    width = WIDTH / HEIGHT
    places = [(state.x + i * width, state.y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    reach = 2 * state.radius
    near = [(x, y) for x, y in places if abs(x) < width / 2 + reach and abs(y) < 0.5 + reach]
    return np.asarray(np.clip(sum(coverage(shape, x, y, state.radius, HEIGHT, WIDTH) for x, y in near), 0, 1))


def centred(frames: np.ndarray, colour: str) -> np.ndarray:
    """Turns frames round so that in the middle one the thing of a colour is in the middle, and whole."""
    mask = nearest(frames[len(frames) // 2][None], colour)[0]
    shifts = []
    for count in (mask.sum(1), mask.sum(0)):
        angles = 2 * math.pi * (np.arange(len(count)) + 0.5) / len(count)
        middle = np.angle(np.sum(count * np.exp(1j * angles))) / (2 * math.pi) * len(count)
        shifts.append(round(len(count) / 2 - middle))
    return np.asarray(np.roll(frames, shifts, (1, 2)))


def judge_blocks(frames: np.ndarray, captions: Sequence[str]) -> Iterator[Verdict]:
    """Judges every block by its caption, each as a separate video with the thing in the middle.

    Args:
        frames: uint8 (F, HEIGHT, WIDTH, 3).
        captions: of every block, of one thing each.
    """
    end = 0
    for number, text in enumerate(captions):
        begin, end = end, end + block_frames(number)
        yield judge_block(frames[begin:end], text)


def judge_block(frames: np.ndarray, text: str) -> Verdict:
    """Judges frames of one thing by their caption, with the thing in the middle."""
    (thing,) = read_caption(text).things
    return judge(centred(frames, thing.colour), text)
