"""Reads the samplings that a conversion knows, published or in a file, and warns of unsuitable ones."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.convert_options import default_rows
from wanbuild.published.samplings import SAMPLINGS
from wanrun.errors import UsageError, escaped, shortened
from wanrun.files import read_bounded

MAX_BYTES = 2**20

_TASKS: Mapping[str, str] = MappingProxyType(
    {"rcm-4": "t2v", "rcm-4-ode": "t2v", "rcm-4-i2v": "i2v", "rcm-4-i2v-ode": "i2v"}
)
"""The task of a sampling's models, if they have only one."""

_OF_LORAS = ("lightning-4",)
"""The samplings of models that are mostly published as LoRAs."""


def sampling_doubts(sampling: str | None, task: str, repository: str | None, merged: bool) -> Iterator[str]:
    """Yields the reasons why a sampling may not suit a model, one line each.

    ``task`` is the model's, such as ``t2v``; ``repository`` the checkpoint's on the hub, None for a folder or
    files. ``merged`` is whether a LoRA, or a transformer in a separate file, was given.
    """
    if sampling is None or sampling not in SAMPLINGS:
        return
    place = repository or ""
    base = place.startswith("Wan-AI/") and "distill" not in place.lower()
    if (made_for := _TASKS.get(sampling, task)) != task:
        yield f"the sampling {sampling} is for models of {made_for}, and this is one of {task}"
    if base and not merged:
        yield f"the sampling {sampling} is for distilled models, and {repository} is not distilled"
    elif not merged and sampling in _OF_LORAS:
        yield (
            f"the sampling {sampling} is for models with a distilled LoRA, and none was given; if the "
            "checkpoint is not distilled itself, add it: --lora FILE, or --lora-high and --lora-low"
        )


def with_sampling(sampling: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of a sampling, a name or a .toml file (None: none), replaced by given ones.

    Raises UsageError for an unknown name, or a file that cannot be read or has an unknown key.
    """
    if sampling is None:
        return dict(given)
    if (named := SAMPLINGS.get(sampling)) is not None:
        return {**named, **given}
    if not sampling.endswith(".toml"):
        expected = f"one of {', '.join(SAMPLINGS)}, or a .toml file"
        raise UsageError("unknown_name", f"there is no sampling {shortened(sampling)}", expected=expected)
    what = f"the sampling {escaped(sampling)}"
    try:
        read = tomllib.loads(read_bounded(Path(sampling), MAX_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("unreadable", f"{what} cannot be read", found=error) from None
    if unknown := read.keys() - default_rows().keys():
        expected = f"some of {', '.join(default_rows())}"
        raise UsageError(
            "unknown_parameter",
            f"{what} has an unknown key",
            expected=expected,
            found=shortened(min(unknown)),
        )
    return {**read, **given}
