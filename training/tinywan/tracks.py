"""Where the things of a video are: found by their colours, frame after frame. Plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tinywan.vocabulary import COLOURS, GROUNDS, Colour

LEAST_AREA = 0.006
"""The smallest part of a frame that counts as a thing."""

LEAST_FRAMES = 0.6
"""The least share of frames that must show a thing."""


@dataclass(frozen=True, eq=False)
class Track:
    """A thing of one colour in the N frames that show it.

    Args:
        frames: int (N,), the numbers of those frames.
        masks: bool (N, H, W), the pixels of the thing.
        x, y: float (N,), its centre, from the middle of a frame in heights of it.
        radius: float (N,), of the ball of its area, likewise.
    """

    frames: np.ndarray
    masks: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray


def find(frames: np.ndarray, colours: Iterable[str]) -> Mapping[str, Track]:
    """Finds the largest thing of every colour.

    Args:
        frames: uint8 (T, H, W, 3).
        colours: some of ``COLOURS``.

    Returns:
        Of every colour that is there its track.
    """
    classes = _classes(blurred(frames))
    found = {name: _track(classes == list(COLOURS).index(name)) for name in colours}
    return {name: track for name, track in found.items() if track is not None}


def nearest(frames: np.ndarray, colour: str) -> np.ndarray:
    """Returns which pixels of frames are nearest to a thing's colour, bool (T, H, W)."""
    return np.asarray(_classes(blurred(frames)) == list(COLOURS).index(colour))


def blurred(frames: np.ndarray) -> np.ndarray:
    """Returns the mean over 3x3 pixels, float32 (T, H, W, 3), so that noise does not decide."""
    padded = np.pad(frames.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    H, W = frames.shape[1:3]
    return np.asarray(sum(padded[:, i : i + H, j : j + W] for i in range(3) for j in range(3)) / 9)


def distance(pixels: np.ndarray, colour: Colour) -> np.ndarray:
    """Returns the square of the distance of every pixel (..., 3) from a colour."""
    return np.asarray(np.square(pixels - np.asarray(colour, np.float32)).sum(-1))


def _classes(pixels: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest colour of a thing, int (T, H, W); above all of them for the ground."""
    colours = [*COLOURS.values(), *GROUNDS.values()]
    return np.argmin(np.stack([distance(pixels, colour) for colour in colours]), 0)


def _track(masks: np.ndarray) -> Track | None:
    """Returns the thing that masks bool (T, H, W) of one colour show; None if there is none."""
    height, width = masks.shape[1:]
    masks = _largest(masks)
    areas = masks.sum((1, 2))
    there = areas >= LEAST_AREA * height * width
    if there.mean() < LEAST_FRAMES:
        return None
    rows, columns = np.mgrid[:height, :width]
    masks, areas = masks[there], areas[there]
    x, y = (
        np.array([grid[mask].mean() for mask in masks]) / height
        for grid in (columns + 0.5 - width / 2, rows + 0.5 - height / 2)
    )
    return Track(np.flatnonzero(there), masks, x, y, np.sqrt(areas / math.pi) / height)


def _largest(masks: np.ndarray) -> np.ndarray:
    """Returns the largest connected part of every mask (T, H, W)."""
    label = np.where(masks, np.arange(1, masks.size + 1).reshape(masks.shape), 0)
    while True:
        wide = np.pad(label, ((0, 0), (1, 1), (1, 1)))
        beside = (wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
        spread = np.where(masks, np.max([label, *beside], 0), 0)
        if np.array_equal(spread, label):
            break
        label = spread
    counts = np.bincount(label.ravel(), minlength=label.size + 1)[1:].reshape(len(masks), -1)
    first = np.arange(len(masks)) * masks[0].size + 1
    return np.asarray(label == (first + counts.argmax(1))[:, None, None])
