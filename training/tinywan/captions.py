"""Captions in plain English, in several wordings: written for a scene, and read back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tinywan.scenes import Scene, Thing
from tinywan.vocabulary import COLOURS, GROUNDS, MOTIONS, SHAPES, SIZES, TEXTURES


class CaptionError(ValueError):
    """A caption without the words of the tables."""


def caption(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """Writes a caption.

    Args:
        scene: what it says.
        rng: chooses among the wordings; None for the usual ones.
    """

    def one(words: Sequence[str]) -> str:
        return words[0] if rng is None else str(rng.choice(words))

    def clause(thing: Thing) -> str:
        look = " ".join(word for word in (thing.size, thing.colour, one(SHAPES[thing.shape])) if word)
        return f"a {look}" if thing.motion is None else f"a {look} {one(MOTIONS[thing.motion])}"

    texture = "" if scene.texture == "plain" and (rng is None or rng.random() < 0.7) else f"{scene.texture} "
    place = one(["over {}", "on {}", "on a {}"]).format(f"{texture}{scene.ground} ground")
    joint = one([" and ", " while "])
    things = joint.join(clause(thing) for thing in scene.things)
    turned = rng is not None and rng.random() < 0.25
    text = f"{place}, {things}" if turned else f"{things} {place}"
    if rng is not None and rng.random() < 0.2:
        return f"{text[0].upper()}{text[1:]}."
    return text


def read_caption(text: str) -> Scene:
    """Reads a caption.

    Raises:
        CaptionError: if it does not name a ground, or of any thing the colour, shape or motion.
    """
    text = " ".join(re.findall(r"[a-z]+", text.lower()))
    place = re.search(r"\b(?:over|on)(?: an?| the)?((?: \w+)?) (\w+) ground\b", text)
    if place is None or place[2] not in GROUNDS:
        raise CaptionError(f"no ground in '{text}'; expected one of {', '.join(GROUNDS)}")
    texture = place[1].strip() or "plain"
    if texture not in TEXTURES:
        raise CaptionError(f"no such ground as '{texture}'; expected one of {', '.join(TEXTURES)}")
    rest = text.replace(place[0], " ")
    return Scene(tuple(_read_thing(part) for part in re.split(r"\band\b|\bwhile\b", rest)), place[2], texture)


def unknown_words(text: str) -> list[str]:
    """Returns the words of a text that no caption has: a model of captions has not learned them."""
    tables = (COLOURS, GROUNDS, TEXTURES, SIZES, *SHAPES.values(), *MOTIONS.values())
    known = {word for table in tables for phrase in table for word in phrase.split()}
    known |= {"a", "an", "the", "on", "over", "ground", "and", "while"}
    return [word for word in dict.fromkeys(re.findall(r"\w+", text.lower())) if word not in known]


def _read_thing(text: str) -> Thing:
    shapes = {word: name for name, words in SHAPES.items() for word in words}
    motions = {phrase: name for name, phrases in MOTIONS.items() for phrase in phrases}
    size = _found(text, SIZES)
    return Thing(
        _named(text, {name: name for name in COLOURS}, "colour"),
        _named(text, shapes, "shape"),
        _named(text, motions, "motion"),
        size,
    )


def _found(text: str, phrases: Iterable[str]) -> str | None:
    """Returns the longest phrase in a text."""
    found = (phrase for phrase in phrases if re.search(rf"\b{phrase}\b", text))
    return max(found, key=len, default=None)


def _named(text: str, phrases: Mapping[str, str], what: str) -> str:
    """Returns what the longest phrase in a text means."""
    phrase = _found(text, phrases)
    if phrase is None:
        raise CaptionError(f"no {what} in '{text.strip()}'; expected one of {', '.join(phrases)}")
    return phrases[phrase]
