"""Draws a scene as a video, with anti-aliased edges. Plain NumPy.

Lengths are in units of a frame's height, x to the right and y down, the origin in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tinywan.scenes import SIDEWAYS, Scene, Thing
from tinywan.vocabulary import COLOURS, GROUNDS, SIZES

HEIGHT, WIDTH, FRAMES = 64, 96, 17
"""Of the videos that tiny checkpoints learn from and make, in pixels and frames."""

RADIUS = 0.17
"""The usual radius of a ball. All shapes of a size have its area."""

SAMPLES = 4
"""Samples of a pixel along each axis."""

CONTRAST = 9
"""How much lighter or darker a texture is than its ground, in levels."""

TOP = -math.pi / 2
"""The angle at which a star's and a triangle's first corner is, and at which a circle begins."""


def _polygon(radii: tuple[float, ...]) -> np.ndarray:
    """Returns the corners (n, 2) at these distances and equal angles, scaled to the area of a unit ball."""
    angles = TOP + np.arange(len(radii)) * 2 * math.pi / len(radii)
    corners = np.stack([np.cos(angles), np.sin(angles)], -1) * np.reshape(radii, (-1, 1))
    x, y = corners.T
    area = 0.5 * abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))
    return np.asarray(corners * math.sqrt(math.pi / area))


def inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which points are inside a shape with the area of a ball of radius 1 about the origin; bool."""
    if shape == "ball":
        return np.asarray(x * x + y * y <= 1)
    if shape == "box":
        half = math.sqrt(math.pi) / 2
        return np.asarray((abs(x) <= half) & (abs(y) <= half))
    corners = _polygon((1.0,) * 3 if shape == "triangle" else (1.0, 0.45) * 5)
    crossings = np.zeros(np.broadcast(x, y).shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            crossings ^= ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return crossings


@dataclass(frozen=True)
class Path:
    """Where a thing is, and how large, in every frame.

    Args:
        x, y: float (T,).
        radius: float (T,), of the ball of its area.
    """

    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray


_STEPS: Mapping[str, tuple[int, int]] = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}


def random_path(
    thing: Thing, frames: int, box: tuple[float, float, float, float], rng: np.random.Generator
) -> Path:
    """Draws a path of a thing within a box (left, top, right, bottom), which it does not leave."""
    left, top, right, bottom = box
    time = np.linspace(0, 1, frames)
    most = 0.42 * min(right - left, bottom - top)
    radius = min(RADIUS * SIZES.get(thing.size or "", 1.0) * rng.uniform(0.94, 1.06), most)
    radii = np.full(frames, radius)
    if thing.motion in ("grow", "shrink"):
        radii = radius * (0.65 + 0.75 * time)
        radii = np.minimum(radii, most)[:: 1 if thing.motion == "grow" else -1]
    reach = 1.35 * radii.max()  # a triangle's corner is 1.35 radii away
    width, height = max(right - left - 2 * reach, 0), max(bottom - top - 2 * reach, 0)
    x0, y0 = (left + right) / 2, (top + bottom) / 2
    if thing.motion == "circle":
        round_radius = min(width, height) / 2 * rng.uniform(0.55, 0.75)  # as fast as those that go sideways
        angle = TOP + rng.uniform(-0.3, 0.3) + 2 * math.pi * time  # clockwise, from the top
        x0 += rng.uniform(-0.5, 0.5) * (width - 2 * round_radius)
        y0 += rng.uniform(-0.5, 0.5) * (height - 2 * round_radius)
        return Path(x0 + round_radius * np.cos(angle), y0 + round_radius * np.sin(angle), radii)
    if thing.motion is None:
        return _nameless_path(x0, y0, width, height, radii, rng)
    dx, dy = _STEPS.get(thing.motion, (0, 0))
    x0 += rng.uniform(-0.5, 0.5) * width * (1 - abs(dx))
    y0 += rng.uniform(-0.5, 0.5) * height * (1 - abs(dy))
    share = rng.uniform(0.8, 1) * (time - 0.5)
    return Path(x0 + dx * width * share, y0 + dy * height * share, radii)


def _nameless_path(
    x0: float, y0: float, width: float, height: float, radii: np.ndarray, rng: np.random.Generator
) -> Path:
    """Draws a way from one place to another that is askew: straight, or half a circle.

    Args:
        x0, y0: the middle.
        width, height: the room for the centre.
        radii: of every frame.
        rng: chooses.
    """
    time = np.linspace(0, 1, len(radii))
    askew = rng.uniform(math.pi / 6, math.pi / 3) + rng.integers(0, 4) * math.pi / 2
    dx, dy = math.cos(askew), math.sin(askew)
    if rng.random() < 0.5:
        way = rng.uniform(0.8, 1) * min(width / abs(dx), height / abs(dy)) * (time - 0.5)
        return Path(x0 + dx * way, y0 + dy * way, radii)
    half = min(width, height) / 2 * rng.uniform(0.6, 1)
    angle = askew + math.pi * time * rng.choice([-1, 1])
    return Path(x0 + half * np.cos(angle), y0 + half * np.sin(angle), radii)


def boxes(scene: Scene, width: float) -> list[tuple[float, float, float, float]]:
    """Returns the box of every thing: the frame; of two things its halves, along what their motions need."""
    half = width / 2
    if len(scene.things) == 1:
        return [(-half, -0.5, half, 0.5)]
    if any(thing.motion in SIDEWAYS for thing in scene.things):
        return [(-half, -0.5, half, 0.0), (-half, 0.0, half, 0.5)]
    return [(-half, -0.5, 0.0, 0.5), (0.0, -0.5, half, 0.5)]


def draw(scene: Scene, frames: int, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a video.

    Args:
        scene: what it shows.
        frames: their number, T.
        height: H, pixels.
        width: W, pixels.
        rng: chooses places, speeds and the texture's phase.

    Returns:
        uint8 (T, H, W, 3).
    """
    ground = draw_ground(scene, height, width, rng)
    video = np.repeat(ground[None], frames, 0)
    for thing, box in zip(scene.things, boxes(scene, width / height), strict=True):
        path = random_path(thing, frames, box, rng)
        for frame, x, y, radius in zip(video, path.x, path.y, path.radius, strict=True):
            cover = coverage(thing.shape, x, y, radius, height, width)[..., None]
            frame += cover * (np.asarray(COLOURS[thing.colour]) - frame)
    return np.asarray(np.clip(np.rint(video), 0, 255).astype(np.uint8))


def coverage(shape: str, x: float, y: float, radius: float, height: int, width: int) -> np.ndarray:
    """Returns the share of every pixel that a shape covers, float (H, W)."""
    cover = np.zeros((height, width))
    rows = _near(y, radius, height, height)
    columns = _near(x, radius, width, height)
    points = inside(
        shape,
        (_samples(columns, width, height)[None, :] - x) / radius,
        (_samples(rows, height, height)[:, None] - y) / radius,
    )
    inner = cover[rows.start : rows.stop, columns.start : columns.stop]
    inner[:] = points.reshape(len(rows), SAMPLES, len(columns), SAMPLES).mean((1, 3))
    return cover


def tile(height: int) -> int:
    """Returns the side of a texture's squares and the width of its stripes, in pixels."""
    return max(height // 8, 2)


def _near(centre: float, radius: float, pixels: int, height: int) -> range:
    """Returns the pixels of an axis that a shape can reach: a star's corner is 1.8 radii away."""
    middle, reach = centre * height + pixels / 2, 2 * radius * height
    first, last = math.floor(middle - reach), math.ceil(middle + reach)
    return range(min(max(first, 0), pixels), max(min(last, pixels), 0))


def _samples(axis: range, pixels: int, height: int) -> np.ndarray:
    """Returns where the samples of an axis's pixels are, in heights of a frame."""
    samples = np.arange(axis.start * SAMPLES, axis.stop * SAMPLES)
    return np.asarray(((samples + 0.5) / (pixels * SAMPLES) - 0.5) * pixels / height)


def draw_ground(scene: Scene, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the ground, float (H, W, 3); ``rng`` chooses the texture's phase."""
    rows, columns = np.mgrid[:height, :width]
    size = tile(height)
    shift = rng.integers(0, 2 * size, 2)
    if scene.texture == "striped":
        pattern = ((rows + columns + shift[0]) // size % 2) * 2.0 - 1
    elif scene.texture == "checked":
        pattern = ((rows + shift[0]) // size + (columns + shift[1]) // size) % 2 * 2.0 - 1
    elif scene.texture == "speckled":
        coarse = rng.uniform(-1, 1, (-(-height // 2), -(-width // 2)))
        pattern = coarse.repeat(2, 0).repeat(2, 1)[:height, :width]
    else:
        pattern = np.zeros((height, width))
    return np.asarray(np.asarray(GROUNDS[scene.ground]) + CONTRAST * pattern[..., None])
