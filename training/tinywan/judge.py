"""A judge of videos: which colours, shapes and motions of a caption are there. Plain NumPy.

A thing is found by its colour, its shape by the template with which it overlaps most, its motion by where its
centre is and how large it is, frame after frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tinywan.captions import read_caption
from tinywan.drawing import coverage
from tinywan.scenes import Scene
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES

LEAST_AREA = 0.006
"""The smallest part of a frame that counts as a thing."""

LEAST_FRAMES = 0.6
"""The least share of frames that must show a thing."""

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
    """Which facts of a caption hold.

    Args:
        facts: by fact, such as ``red``, ``red star`` or ``red right``, whether it holds; and ``red ground``.
    """

    facts: Mapping[str, bool]

    @property
    def score(self) -> float:
        """The share of the facts that hold."""
        return sum(self.facts.values()) / len(self.facts)

    @property
    def motion(self) -> float:
        """The share of the motions that hold."""
        motions = [holds for fact, holds in self.facts.items() if fact.split()[-1] in MOTIONS]
        return sum(motions) / len(motions)


def judge(frames: np.ndarray, caption: str) -> Verdict:
    """Judges a video.

    Args:
        frames: uint8 (T, H, W, 3).
        caption: what it should show; see ``captions``.

    Raises:
        CaptionError: if the caption does not say so.
    """
    scene = read_caption(caption)
    seen = look(frames, scene)
    facts: dict[str, bool] = {f"{scene.ground} ground": ground(frames) == scene.ground}
    for thing in scene.things:
        found = seen.get(thing.colour)
        facts[thing.colour] = found is not None
        facts[f"{thing.colour} {thing.shape}"] = found is not None and found.shape == thing.shape
        facts[f"{thing.colour} {thing.motion}"] = found is not None and found.motion == thing.motion
    return Verdict(facts)


def ground(frames: np.ndarray) -> str:
    """Returns the colour of the ground: that which is nearest to the median of the first and last frame."""
    pixels = _blurred(frames[[0, -1]]).reshape(-1, 3)
    distances = {name: _distance(np.median(pixels, 0), colour) for name, colour in GROUNDS.items()}
    return min(distances, key=lambda name: float(distances[name]))


def look(frames: np.ndarray, scene: Scene | None = None) -> dict[str, Seen]:
    """Returns what is seen of every colour that is there.

    Args:
        frames: uint8 (T, H, W, 3).
        scene: the colours to look for; None for all.
    """
    names = list(COLOURS) if scene is None else [thing.colour for thing in scene.things]
    classes = _classes(_blurred(frames))
    found = {name: _seen(classes == list(COLOURS).index(name)) for name in names}
    return {name: seen for name, seen in found.items() if seen is not None}


def _blurred(frames: np.ndarray) -> np.ndarray:
    """Returns the mean over 3x3 pixels, float32, so that noise does not decide."""
    padded = np.pad(frames.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    H, W = frames.shape[1:3]
    return np.asarray(sum(padded[:, i : i + H, j : j + W] for i in range(3) for j in range(3)) / 9)


def _distance(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return np.asarray(np.square(pixels - np.asarray(colour, np.float32)).sum(-1))


def _classes(pixels: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest colour of a thing, int (T, H, W); above all of them for the ground."""
    colours = [*COLOURS.values(), *GROUNDS.values()]
    return np.argmin(np.stack([_distance(pixels, colour) for colour in colours]), 0)


def _seen(masks: np.ndarray) -> Seen | None:
    """Returns what masks bool (T, H, W) of one colour show; None if that is nothing."""
    height, width = masks.shape[1:]
    masks = np.stack([_largest(mask) for mask in masks])
    areas = masks.sum((1, 2))
    there = areas >= LEAST_AREA * height * width
    if there.mean() < LEAST_FRAMES:
        return None
    rows, columns = np.mgrid[:height, :width]
    x, y = (
        np.array([grid[mask].mean() if ok else math.nan for mask, ok in zip(masks, there, strict=True)])
        for grid in (columns + 0.5 - width / 2, rows + 0.5 - height / 2)
    )
    x, y, radius = x[there] / height, y[there] / height, np.sqrt(areas[there] / math.pi) / height
    return Seen(_shape(masks[there], x, y, radius), _motion(x, y, radius))


def _largest(mask: np.ndarray) -> np.ndarray:
    """Returns the largest connected part of a mask (H, W)."""
    label = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        wide = np.pad(label, 1)
        beside = (wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:])
        spread = np.where(mask, np.max([label, *beside], 0), 0)
        if np.array_equal(spread, label):
            break
        label = spread
    counts = np.bincount(label.ravel())[1:]
    return label == counts.argmax() + 1 if counts.size else mask


def _shape(masks: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> str | None:
    """Returns the shape whose templates overlap the masks most."""
    height, width = masks.shape[1:]
    chosen = np.unique(np.linspace(0, len(masks) - 1, min(len(masks), 7)).round().astype(int))

    def overlap(shape: str) -> float:
        shares = []
        for index in chosen:
            template = coverage(shape, x[index], y[index], radius[index], height, width)
            both = np.minimum(template, masks[index]).sum()
            shares.append(both / np.maximum(template, masks[index]).sum())
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
