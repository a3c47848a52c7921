"""A judge of videos: which colours, shapes and motions of a caption are there, and how badly drawn they are.

A thing is found by its colour (``tracks``), its shape by the template with which it overlaps most, its motion
by where its centre is and how large it is, frame after frame. Plain NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinywan.captions import read_caption
from tinywan.drawing import coverage
from tinywan.flaws import Flaw, flaws
from tinywan.scenes import Scene
from tinywan.tracks import Track, blurred, distance, find
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES

LEAST_OVERLAP = 0.6
"""The least overlap with the best template, intersection by union, of something that has a shape."""

LEAST_MOVE = 0.12
"""The least way of a thing that moves, in heights of a frame."""

LEAST_GROWTH = math.log(1.35)
"""The least logarithm of the ratio of two radii of a thing that grows."""


@dataclass(frozen=True)
class Seen:
    """What was seen of one colour.

    Args:
        shape: one of ``SHAPES``; None if it looks like none of them.
        motion: one of ``MOTIONS``; None if it does nothing of that kind.
    """

    shape: str | None
    motion: str | None


@dataclass(frozen=True)
class Verdict:
    """What a video shows of a caption, and how well.

    Args:
        facts: by fact, such as ``red``, ``red star`` or ``red right``, whether it holds; and ``red ground``.
        flaws: how badly it is drawn.
    """

    facts: Mapping[str, bool]
    flaws: Sequence[Flaw]

    @property
    def score(self) -> float:
        """The share of the facts that hold."""
        return sum(self.facts.values()) / len(self.facts)

    @property
    def motion(self) -> float:
        """The share of the motions that hold."""
        motions = [holds for fact, holds in self.facts.items() if fact.split()[-1] in MOTIONS]
        return sum(motions) / len(motions)

    @property
    def badly_drawn(self) -> Sequence[Flaw]:
        """The flaws that are too large."""
        return [flaw for flaw in self.flaws if flaw.too_large]


def judge(frames: np.ndarray, caption: str) -> Verdict:
    """Judges a video.

    Args:
        frames: uint8 (T, H, W, 3).
        caption: what it should show; see ``captions``.

    Raises:
        CaptionError: if the caption does not say so.
    """
    scene = read_caption(caption)
    tracks = find(frames, [thing.colour for thing in scene.things])
    facts: dict[str, bool] = {f"{scene.ground} ground": ground(frames) == scene.ground}
    for thing in scene.things:
        found = _seen(tracks[thing.colour]) if thing.colour in tracks else None
        facts[thing.colour] = found is not None
        facts[f"{thing.colour} {thing.shape}"] = found is not None and found.shape == thing.shape
        facts[f"{thing.colour} {thing.motion}"] = found is not None and found.motion == thing.motion
    return Verdict(facts, flaws(frames, scene, tracks))


def ground(frames: np.ndarray) -> str:
    """Returns the colour of the ground: that which is nearest to the median of the first and last frame."""
    pixels = blurred(frames[[0, -1]]).reshape(-1, 3)
    distances = {name: distance(np.median(pixels, 0), colour) for name, colour in GROUNDS.items()}
    return min(distances, key=lambda name: float(distances[name]))


def look(frames: np.ndarray, scene: Scene | None = None) -> dict[str, Seen]:
    """Returns what is seen of every colour that is there.

    Args:
        frames: uint8 (T, H, W, 3).
        scene: the colours to look for; None for all.
    """
    names = list(COLOURS) if scene is None else [thing.colour for thing in scene.things]
    return {name: _seen(track) for name, track in find(frames, names).items()}


def _seen(track: Track) -> Seen:
    return Seen(_shape(track), _motion(track.x, track.y, track.radius))


def _shape(track: Track) -> str | None:
    """Returns the shape whose templates overlap the masks most."""
    height, width = track.masks.shape[1:]
    count = len(track.masks)
    chosen = np.unique(np.linspace(0, count - 1, min(count, 7)).round().astype(int))

    def overlap(shape: str) -> float:
        shares = []
        for index in chosen:
            mask = track.masks[index]
            template = coverage(shape, track.x[index], track.y[index], track.radius[index], height, width)
            shares.append(np.minimum(template, mask).sum() / np.maximum(template, mask).sum())
        return float(np.median(shares))

    overlaps = {shape: overlap(shape) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= LEAST_OVERLAP else None


def _motion(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> str | None:
    """Returns the motion of a centre, in heights of a frame; None if there is none."""
    end = max(len(x) // 5, 1)  # frames that are averaged at either end
    dx, dy = (float(np.mean(a[-end:]) - np.mean(a[:end])) for a in (x, y))
    way = float(np.hypot(np.diff(x), np.diff(y)).sum())
    growth = float(np.log(np.mean(radius[-end:]) / np.mean(radius[:end])))
    turned = abs(_turned(x, y))
    if math.hypot(dx, dy) < LEAST_MOVE:
        if abs(growth) >= LEAST_GROWTH and turned < math.pi:
            return "grow" if growth > 0 else "shrink"
        return "circle" if way >= 2 * LEAST_MOVE and turned >= 1.3 * math.pi else None
    if turned >= 1.3 * math.pi:
        return "circle"
    if abs(dx) < 2 * abs(dy) and abs(dy) < 2 * abs(dx):
        return None  # between two directions
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def _turned(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the angle by which a centre went round the middle of its ways; 0 if that is small."""
    middle_x, middle_y = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    if min(x.max() - x.min(), y.max() - y.min()) < LEAST_MOVE / 2:
        return 0.0
    angle = np.unwrap(np.arctan2(y - middle_y, x - middle_x))
    return float(angle[-1] - angle[0])
