"""Formats of a manifest before today's, and how the records of each become the next one's.

| format | the next one changed | an artifact of it |
|---|---|---|
| 1, 2 | stored programs | is converted and compiled again |
| 3 | records: a program has a role, and the task has no order of programs | is compiled again |
| 4 | programs: guidance has a scale for each step, instead of a batch of two | is compiled again |

A field that is added with a default needs no format: a manifest without it is read, and means the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

FORMAT_VERSION: Final = 5
"""The format that is written. An older release of wanrun cannot read another number."""

Content = dict[str, Any]
"""A manifest as JSON has it."""


@dataclass(frozen=True)
class Older:
    """A format before today's, with the same weights.

    ``upgrade`` makes a manifest of this format one of the next, in place. ``runs`` says whether its programs
    still run; else ``wanbuild compile --again`` builds today's.
    """

    upgrade: Callable[[Content], None]
    runs: bool = True


_ROLES: Final = (
    ("encode_text_64", "text"),
    ("encode_text_128", "text"),
    ("encode_text_256", "text"),
    ("encode_text", "text"),
    ("encode_image", "once"),
    ("encode_video", "window"),
    ("prepare", "prepare"),
    ("denoise_step", "step"),
    ("denoise_loop", "scan"),
    ("decode_video", "decode"),
    ("spread_text_encoder", "spread"),
    ("spread_image_encoder", "spread"),
    ("spread_transformer", "spread"),
    ("spread_vae", "spread"),
)
"""All programs of format 3 by name, with their roles in format 4; those of one role in order."""


def _with_roles(content: Content) -> None:
    """Format 3: the runtime knew a program by its name."""
    del content["model"]["task"]["order"]
    for one in content["program_sets"].values():
        for programs in one["programs"].values():
            places: dict[str, int] = {}
            for name, role in _ROLES:
                if name in programs:
                    place = places.setdefault(role, 0)
                    programs[name] |= {"role": role, "place": place}
                    places[role] += 1


def _unchanged(content: Content) -> None:
    """Format 4: guidance was a batch of two in the programs of a step, which took one scale for all steps."""


OLDER: Final[Mapping[int, Older]] = MappingProxyType(
    {3: Older(_with_roles), 4: Older(_unchanged, runs=False)}
)
"""The formats that are read, by number; each one's successor is the next number."""


def is_read(version: object, again: bool) -> bool:
    """Returns whether manifests of a format are read.

    ``again`` says that the programs are about to be built again, so that they need not run.
    """
    if not isinstance(version, int) or version not in {*OLDER, FORMAT_VERSION}:
        return False
    return again or all(older.runs for number, older in OLDER.items() if number >= version)


def upgraded(content: Content) -> Content:
    """Returns a manifest of a format that is read as one of today's; ``content`` is not changed.

    Its digests stay those of the file. Raises LookupError, TypeError or AttributeError if its records are not
    those of its format.
    """
    version = content["format_version"]
    if version == FORMAT_VERSION:
        return content
    content = deepcopy(content)
    for number in range(version, FORMAT_VERSION):
        OLDER[number].upgrade(content)
    return content | {"format_version": FORMAT_VERSION}
