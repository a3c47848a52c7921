"""The request of ``wanbuild calibrate``: a typed record, with a row for each option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wanrun.errors import UsageError, shortened
from wanrun.rows import ARGUMENT, option


def parse_counts(text: str) -> tuple[int, ...]:
    """Parses whole numbers separated by commas; raises UsageError for others."""
    if not all(part.strip().isdecimal() and len(part) < 7 for part in text.split(",")):
        raise UsageError(
            "wrong_type", "not a list of whole numbers", expected="such as 30,20,12", found=shortened(text)
        )
    return tuple(int(part) for part in text.split(","))


class CalibrateRequest(Struct, frozen=True):
    """What ``wanbuild calibrate`` does."""

    artifact: Annotated[Path, ARGUMENT]
    """The artifact's folder."""
    prompts: Annotated[
        Path | None,
        option(
            "A prompts file, as for wanrun: a third decides, a third reports.", default="36 of many kinds"
        ),
    ] = None
    evaluations: Annotated[
        tuple[int, ...] | None,
        option(
            "Calls of the transformers, for guidance too.",
            default="1/2, 1/3, 1/5 and 2/15 of the published",
            value="N,N,...",
            parse=parse_counts,
        ),
    ] = None
    """A step with guidance takes two."""
    reference_steps: Annotated[
        Annotated[int, Meta(ge=10, le=1000)], option("Steps of the runs that count as converged.")
    ] = 100
    profile: Annotated[str | None, option("A built profile.", default="the first one", value="NAME")] = None
    minutes: Annotated[
        Annotated[float, Meta(ge=0)] | None, option("Time limit for beginning another number of steps.")
    ] = None
    source: Annotated[
        Path | None,
        option(
            "Another artifact, whose schedules are measured here; those that are surely nearer are taken."
        ),
    ] = msgspec.field(default=None, name="from")
