"""What Python code gives to ``load`` and ``generate``, held to its types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec
import numpy as np

from wanrun.errors import UsageError, quoted, shortened
from wanrun.generation.plain import as_plain
from wanrun.loading.policy import LoadChoices, LoadPolicy, ProfileChoices
from wanrun.media.types import MEDIA_KINDS, Inputs, Media
from wanrun.timing import Timings


def wrong_type(name: str, expected: str, found: object, remedy: str | None = None) -> UsageError:
    """What is said of an argument of another type."""
    return UsageError(f"{name} has the wrong type", expected=expected, found=quoted(found), remedy=remedy)


def check_objects(
    media: object = None, inputs: object = None, timings: object = None, **callables: object
) -> None:
    """Raises UsageError for an argument of another class; None stands for none but among ``callables``."""
    for name, value, kind in (
        ("media", media, Media),
        ("inputs", inputs, Inputs),
        ("timings", timings, Timings),
    ):
        if value is not None and not isinstance(value, kind):
            raise wrong_type(name, f"wanrun's {kind.__name__}", value)
    for name, value in callables.items():
        if not callable(value):
            raise wrong_type(name, "a function", value)


def folder_of(artifact: object) -> Path:
    """The artifact's folder, with no link in its path.

    Raises:
        UsageError: for what is no path, or what no folder can be called.
    """
    try:
        name = artifact if isinstance(artifact, str) else os.fspath(artifact)  # type: ignore[call-overload]
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise wrong_type("artifact", "a path", artifact)
    try:
        if name:
            return Path(os.path.realpath(name))  # resolve() raises on a loop of links
    except ValueError:  # a NUL, or half of a surrogate pair
        pass
    raise UsageError("artifact is no folder name", found=quoted(name))


def sorted_out(given: Mapping[str, Any]) -> tuple[ProfileChoices, LoadPolicy]:
    """The choices of ``load``: what is to be loaded, and how.

    Raises:
        UsageError: for a choice that there is not, or one of another type.
    """
    kinds, choices = get_type_hints(LoadChoices), dict[str, Any]()
    for name, value in given.items():
        if name not in kinds:
            raise UsageError(f"unknown option {shortened(name)}", expected="one of " + ", ".join(kinds))
        try:
            choices[name] = msgspec.convert(as_plain(value), kinds[name])
        except msgspec.ValidationError:
            raise wrong_type(name, _in_words(kinds[name]), value) from None
    wanted = {name: choices.pop(name) for name in ProfileChoices.__annotations__ if name in choices}
    return cast("ProfileChoices", wanted), LoadPolicy(**choices)


def _in_words(kind: Any) -> str:
    """A type of ``LoadChoices`` for messages, without the None that stands for a default."""
    words = {int: "an integer", bool: "True or False", str: "a string"}
    return next((words[one] for one in (kind, *get_args(kind)) if one in words), "(width, height) in pixels")


def texts_of(prompts: object, name: str = "prompts") -> list[str]:
    """Prompts as a list.

    Raises:
        UsageError: for a single text, and for what is no list of texts.
    """
    given = as_plain(prompts)
    if not isinstance(given, list | tuple) or not all(type(one) is str for one in given):
        raise wrong_type(name, "a list of strings", prompts)
    return list(given)


def array_of(latents: object, name: str = "latents") -> np.ndarray:
    """An array as NumPy's, without a copy where it is one.

    Raises:
        UsageError: for what is no array.
    """
    try:
        if hasattr(latents, "__array__"):
            return np.asarray(latents)
    except (TypeError, ValueError, RuntimeError):  # torch's, of another device or with a gradient
        pass
    raise wrong_type(name, "a NumPy array", latents)


def check_media_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an image or video in memory that is given by name, as files alone can be."""
    for name in MEDIA_KINDS:
        value = options.get(name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if one is not None and not isinstance(one, str | os.PathLike):
                remedy = f"pass what is in memory as media=wanrun.Media({name}=...)"
                raise wrong_type(name, "the path of a file", one, remedy)
