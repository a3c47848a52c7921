"""Checks the types of the arguments of ``load`` and of a pipeline's calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.errors import UsageError, quoted, shortened, wrong_type
from wanrun.media.inputs import MEDIA_KINDS, Inputs, Media
from wanrun.opened.cancel import CancelToken
from wanrun.opened.policy import LoadPolicy
from wanrun.request.elsewhere import ELSEWHERE
from wanrun.request.reading import as_plain, unknown_option
from wanrun.request.schema import aliases, rows
from wanrun.request.written import parse_size
from wanrun.rows import rows_of
from wanrun.timing.timings import Timings

_OF_LOADING = MappingProxyType(
    {
        **ELSEWHERE,
        **{
            name: f"pass {row.name} to generate"
            for row in rows()
            if row.name not in LoadPolicy.__struct_fields__
            for name in (row.name, *row.also)
        },
    }
)
"""What to do instead of a keyword that ``load`` does not have, by its name."""

MAX_PATH_BYTES = 4096
"""Of a path, with the NUL at its end, that Linux takes."""


def check_objects(
    media: object = None,
    inputs: object = None,
    timings: object = None,
    group: object = None,
    cancel: object = None,
    **callables: object,
) -> None:
    """Raises UsageError for an object of a wrong class; None is allowed, except for a function."""
    for name, value, kind in (
        ("media", media, Media),
        ("inputs", inputs, Inputs),
        ("timings", timings, Timings),
        ("cancel", cancel, CancelToken),
        *_groups(group),
    ):
        if value is not None and not isinstance(value, kind):
            raise wrong_type(name, f"wanrun's {kind.__name__}", value)
    for name, value in callables.items():
        if not callable(value):
            raise wrong_type(name, "a function", value)


def _groups(group: object) -> Iterator[tuple[str, object, type]]:
    """Yields a group with its type, which is not imported without one."""
    if group is not None:
        from wanrun.cluster.process_group import ProcessGroup

        yield "group", group, ProcessGroup


def path_of(value: object, name: str) -> Path:
    """Returns an argument that names a file or a folder; raises UsageError if it cannot be a path."""
    try:
        text = value if isinstance(value, str) else os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise wrong_type(name, "a path", value)
    try:
        if text and "\0" not in text and len(os.fsencode(text)) < MAX_PATH_BYTES:
            return Path(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise UsageError("wrong_type", f"{name} is no path", found=quoted(text))


def artifact_of(given: object) -> Artifact:
    """Returns the artifact in a folder, or one that is open, without links in its path.

    Raises ArtifactError as ``open_artifact``; UsageError if the argument cannot be a path, or is an address.
    """
    if isinstance(given, Artifact):
        return replace(given, folder=Path(os.path.realpath(given.folder)))
    if isinstance(given, str) and "://" in given:
        raise UsageError(
            "wrong_kind",
            f"{shortened(given)} is an address",
            expected="an artifact's folder",
            remedy="wanhub.load(address) fetches it, and loads it",
        )
    path = path_of(given, "artifact")
    if not os.path.exists(path):  # noqa: PTH110 - False for a loop of links
        return open_artifact(path)  # raises, and names it as it is written: it may be a hub id
    return open_artifact(Path(os.path.realpath(path)))


def policy_of(given: Mapping[str, Any], others: Iterable[str] = ()) -> LoadPolicy:
    """Returns the options of loading from keywords of ``load``, which also takes ``others``.

    Raises UsageError for an unknown option, a value of a wrong type, or one of ``LoadPolicy.check``.
    """
    known, values = {row.name: row for row in rows_of(LoadPolicy)}, dict[str, Any]()
    for name, value in given.items():
        if name not in known:
            also = {other: one for other, one in aliases().items() if one in known}
            raise unknown_option(name, {**{one: one for one in (*known, *others)}, **also}, _OF_LOADING)
        row, plain = known[name], as_plain(value)
        try:
            if row.base is tuple and isinstance(plain, str):
                plain = parse_size(plain)
            values[name] = msgspec.convert(plain, str if row.choices else row.type)
        except (msgspec.ValidationError, UnicodeEncodeError, UsageError):  # half of a surrogate pair
            raise wrong_type(name, row.kind, value) from None
    policy = LoadPolicy(**values)
    policy.check()
    return policy


def texts_of(prompts: object, name: str = "prompts") -> list[str]:
    """Returns prompts as a list; raises UsageError unless they are a list, tuple or array of strings.

    A single string is not a list of prompts.
    """
    given = as_plain(prompts)
    if not isinstance(given, list | tuple) or not all(type(one) is str for one in given):
        raise wrong_type(name, "a list of strings", prompts)
    return list(given)


def array_of(latents: object) -> np.ndarray:
    """Returns an array of any library as NumPy's; raises UsageError if it is not an array.

    A NumPy array is not copied.
    """
    try:
        if hasattr(latents, "__array__"):
            return np.asarray(latents)
    except (TypeError, ValueError, RuntimeError):  # torch's, of another device or with a gradient
        pass
    raise wrong_type("latents", "a NumPy array", latents)


def check_media_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an image or video in memory among the options: these take only paths."""
    for name in MEDIA_KINDS:
        value = options.get(name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if one is not None and not isinstance(one, str | os.PathLike):
                remedy = f"pass an object in memory as media=wanrun.Media({name}=...)"
                raise wrong_type(name, "the path of a file", one, remedy)
