"""What a video shows: one thing or two, each with a colour, a shape, a size and a motion, on a ground."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES, SIZES, TEXTURES

HELD_OUT_LOOKS = frozenset({("red", "star"), ("blue", "triangle"), ("yellow", "box"), ("white", "ball")})
"""Pairs of colour and shape that no training video shows together: every shape lacks one colour."""

HELD_OUT_MOVES = frozenset({("ball", "up"), ("box", "circle"), ("triangle", "left"), ("star", "down")})
"""Pairs of shape and motion that no training video shows together: every shape lacks one motion."""

SIDEWAYS = frozenset({"right", "left"})
"""Motions that need the width of a frame."""


@dataclass(frozen=True)
class Thing:
    """One thing that moves.

    Args:
        colour: one of ``COLOURS``.
        shape: one of ``SHAPES``.
        motion: one of ``MOTIONS``; None for a way that has no name.
        size: one of ``SIZES``; None for the usual size.
    """

    colour: str
    shape: str
    motion: str | None
    size: str | None = None

    @property
    def held_out(self) -> bool:
        """Whether no training video shows such a thing."""
        return (self.colour, self.shape) in HELD_OUT_LOOKS or (self.shape, self.motion) in HELD_OUT_MOVES


@dataclass(frozen=True)
class Scene:
    """What a video shows.

    Args:
        things: one, or two of different colours that ``fit``; of two, the first is above or to the left.
        ground: one of ``GROUNDS``.
        texture: one of ``TEXTURES``.
    """

    things: tuple[Thing, ...]
    ground: str
    texture: str

    @property
    def held_out(self) -> bool:
        """Whether no training video shows such a scene."""
        return any(thing.held_out for thing in self.things)


def random_scene(
    rng: np.random.Generator, held_out: bool = False, most_things: int = 2, nameless: float = 0.0
) -> Scene:
    """Draws a scene.

    Args:
        rng: the source of randomness.
        held_out: whether every thing of it is held out; otherwise none is.
        most_things: 1 for scenes of one thing; with 2, every third scene has two.
        nameless: the share of things that move in a way without a name. From them a transformer learns that
            any shape can be anywhere; without them what never went down becomes something else on its way.
    """
    count = 2 if most_things > 1 and rng.random() < 1 / 3 else 1
    colours = rng.permutation(list(COLOURS))[:count]
    things: tuple[Thing, ...] = ()
    while not things or not fit(things):
        things = tuple(_thing(rng, str(colour), held_out, nameless) for colour in colours)
    plain = rng.random() < 0.5
    texture = "plain" if plain else str(rng.choice(TEXTURES[1:]))
    return Scene(things, str(rng.choice(list(GROUNDS))), texture)


def fit(things: tuple[Thing, ...]) -> bool:
    """Whether things can move side by side: those that go to a side need the width, others the height."""
    motions = {thing.motion for thing in things}
    return len(things) == 1 or motions.isdisjoint(SIDEWAYS) or motions.isdisjoint({"up", "down", "circle"})


def _thing(rng: np.random.Generator, colour: str, held_out: bool, nameless: float) -> Thing:
    """Draws a thing of a colour until it is held out, or is not."""
    while True:
        size = None if rng.random() < 0.5 else str(rng.choice(list(SIZES)))
        thing = Thing(colour, str(rng.choice(list(SHAPES))), str(rng.choice(list(MOTIONS))), size)
        if nameless and rng.random() < nameless:
            thing = replace(thing, motion=None)
        if thing.held_out == held_out:
            return thing
