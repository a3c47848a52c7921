"""The request of ``wanbuild lora``: a typed record, with a row for each option."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from wanbuild.published.samplings import SAMPLINGS
from wanrun.artifact.adapter import ADAPTER_METADATA
from wanrun.claims import Place
from wanrun.rows import ARGUMENT, option

_FILE = "FILE[:SCALE]"

OUTPUT = Place(mark=re.compile(rb'.{8}\{"__metadata__":\{"%b":' % ADAPTER_METADATA.encode(), re.DOTALL))
"""An adapter's file, recognised by its first bytes."""


class AdapterRequest(Struct, frozen=True, kw_only=True):
    """What ``wanbuild lora`` makes, or removes."""

    artifact: Annotated[Path, ARGUMENT]
    """The artifact's folder."""
    lora: Annotated[Sequence[str], ARGUMENT] = ()
    """Files, each with its scale: for every transformer."""
    lora_high: Annotated[Sequence[str], option("For the high-noise expert; repeatable.", value=_FILE)] = ()
    lora_low: Annotated[Sequence[str], option("For the low-noise expert; repeatable.", value=_FILE)] = ()
    name: Annotated[
        str | None, option("The adapter's name in the artifact.", default="that of the one file")
    ] = None
    output: Annotated[
        Path | None,
        option(
            "Write this file instead, and leave the artifact as it is.",
            value="FILE",
            short="-o",
            writes=OUTPUT,
        ),
    ] = None
    sampling: Annotated[
        str | None,
        option(
            f"Defaults that videos with the adapter have: {', '.join(SAMPLINGS)}, or a file (.toml).",
            value="NAME|FILE",
        ),
    ] = None
    strict: Annotated[
        bool, option("Refuse a LoRA with tensors of layers that the model lacks; else they are left out.")
    ] = False
    force: Annotated[bool, option("Replace an adapter of the same name.")] = False
    remove: Annotated[
        Sequence[str], option("Remove an adapter from the artifact; repeatable.", value="NAME")
    ] = ()
