"""Flaws of a video: how far it is from a clean drawing of what it shows. Plain NumPy.

A caption's facts hold in many a bad video: after six steps of thirty a ball is a ball that rolls, but its
ground is stained. The limits are for the tiny checkpoints: nearly all videos that they make with their usual
steps are below them, and drawn ones are far below. training/README.md has the figures, and what is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tinywan.drawing import coverage, tile
from tinywan.scenes import Scene
from tinywan.tracks import Track
from tinywan.vocabulary import GROUNDS

MOST_STAINS: Mapping[str, float] = MappingProxyType(
    {"plain": 4.0, "striped": 5.0, "speckled": 5.0, "checked": 13.0}
)
"""The most that tiles of the ground may differ from its colour, by texture, in levels.

Up to 2 of them come from an MP4's colours.
"""

MOST_FLICKER: Mapping[str, float] = MappingProxyType(
    {"plain": 1.0, "striped": 2.0, "speckled": 2.0, "checked": 5.0}
)
"""The most that the ground may change from frame to frame, by texture, in levels."""

MOST_OUTLINE: Mapping[str, float] = MappingProxyType({"ball": 2.2, "box": 2.2, "triangle": 2.2, "star": 2.8})
"""The most that an outline may be away from its shape's, in % of a frame's height."""

MOST_JERK = 3.5
"""The most that a thing may be away from a smooth path, in % of a frame's height."""

MARGIN = 0.08
"""Around a thing, in heights of a frame, where the ground is not judged."""

DEGREE = 6
"""Of the polynomial that is a smooth path; it follows a circle."""


@dataclass(frozen=True)
class Flaw:
    """How far a video is from a clean drawing in one respect.

    Args:
        name: ``stains`` and ``flicker`` of the ground, ``outline`` and ``jerk`` of the worst thing.
        value: in ``unit``; infinite if what is measured is not there.
        most: the most that a video of a tiny checkpoint has.
        unit: of both.
    """

    name: str
    value: float
    most: float
    unit: str

    @property
    def too_large(self) -> bool:
        """Whether the value is above the most."""
        return self.value > self.most

    def __str__(self) -> str:
        return f"{self.value:.1f} of {self.most:g} {self.unit}"


def flaws(frames: np.ndarray, scene: Scene, tracks: Mapping[str, Track]) -> Sequence[Flaw]:
    """Measures the flaws of a video.

    Args:
        frames: uint8 (T, H, W, 3).
        scene: what it should show.
        tracks: by colour the things of the scene that were found.
    """
    free = _free(frames.shape[:3], tracks.values())
    paths = [tracks.get(thing.colour) for thing in scene.things]
    outlines = [(thing.shape, _outline(thing.shape, tracks.get(thing.colour))) for thing in scene.things]
    shape, worst = max(outlines, key=lambda one: one[1] / MOST_OUTLINE[one[0]])
    return (
        Flaw("stains", _stains(frames, free, scene.ground), MOST_STAINS[scene.texture], "levels"),
        Flaw("flicker", _flicker(frames, free), MOST_FLICKER[scene.texture], "levels"),
        Flaw("outline", worst, MOST_OUTLINE[shape], "% of the height"),
        Flaw("jerk", max(map(_jerk, paths)), MOST_JERK, "% of the height"),
    )


def _free(shape: tuple[int, ...], tracks: Iterable[Track]) -> np.ndarray:
    """Returns which pixels are those of the ground, bool (T, H, W): all that are not near a thing."""
    things = np.zeros(shape, bool)
    for track in tracks:
        things[track.frames] |= track.masks
    reach = round(MARGIN * shape[1])
    near = np.pad(things, ((0, 0), (reach, reach), (reach, reach)))
    for axis in (1, 2):
        near = np.any(np.lib.stride_tricks.sliding_window_view(near, 2 * reach + 1, axis), -1)
    return ~near


def _stains(frames: np.ndarray, free: np.ndarray, ground: str) -> float:
    """Returns the mean difference of tiles from the ground's colour, of a tile's worst channel.

    Over a tile, two squares or stripes of a texture wide, the texture is nearly gone.
    """
    side = 2 * tile(frames.shape[1])
    pixels = _tiles(free[..., None], side)
    differences = _tiles(np.where(free[..., None], frames - np.asarray(GROUNDS[ground], np.float32), 0), side)
    seen = pixels[..., 0] >= side * side / 2
    if not seen.any():
        return math.inf
    return float(np.mean(np.abs(differences[seen] / pixels[seen]).max(-1)))


def _tiles(video: np.ndarray, side: int) -> np.ndarray:
    """Returns the sums over whole tiles of (T, H, W, C)."""
    T, H, W, C = video.shape
    rows, columns = H // side, W // side
    whole = video[:, : rows * side, : columns * side]
    return np.asarray(whole.reshape(T, rows, side, columns, side, C).sum((2, 4)))


def _flicker(frames: np.ndarray, free: np.ndarray) -> float:
    """Returns the mean change of the ground's pixels from frame to frame."""
    both = free[1:] & free[:-1]
    if not both.any():
        return math.inf
    return float(np.abs(np.diff(frames.astype(np.float32), axis=0))[both].mean())


def _outline(shape: str, track: Track | None) -> float:
    """Returns the mean distance of a thing's outline from its shape's, of the median frame."""
    if track is None:
        return math.inf
    height, width = track.masks.shape[1:]
    distances = []
    for mask, x, y, radius in zip(track.masks, track.x, track.y, track.radius, strict=True):
        template = coverage(shape, x, y, radius, height, width)
        length = np.hypot(*np.gradient(template)).sum()  # of the outline: an edge is one step of 1
        distances.append(np.abs(template - mask).sum() / length)
    return float(np.median(distances)) / height * 100


def _jerk(track: Track | None) -> float:
    """Returns the distance of a thing's centre and radius from a smooth path, a root mean square."""
    if track is None:
        return math.inf
    degree = min(DEGREE, len(track.frames) - 1)
    squares = [
        np.mean(np.square(values - np.polynomial.Polynomial.fit(track.frames, values, degree)(track.frames)))
        for values in (track.x, track.y, track.radius)
    ]
    return math.sqrt(sum(squares)) * 100
