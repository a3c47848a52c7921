"""The fields of a live video: its length, which need not be built, and what goes with none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from wanrun.errors import UsageError
from wanrun.request.lengths import check_live
from wanrun.request.values import OF_WHOLE_VIDEOS
from wanserve.catalog import Model
from wanserve.refusal import RefusedError, refused, whole
from wanserve.values import mistyped

MOST_FRAMES: Final = 10**9


def is_live(value: Any) -> bool:
    """Returns what the field says, also as a form has it. Raises RefusedError for another value."""
    if value not in (True, False, "true", "false") or type(value) is int:
        raise mistyped("live", "true or false", value)
    return value in (True, "true")


def take_live(
    model: Model, options: dict[str, Any], others: Sequence[str], spell: Callable[[str], str]
) -> int | None:
    """Takes the length of a live video out of the options of a request, and returns it; None for no end.

    Args:
        model: the model.
        options: the options by Python name.
        others: fields that are given, and go with no live video.
        spell: returns the client's name of an option.

    Raises:
        RefusedError: if the model makes no such length, or no live videos, and for what goes with none.
    """
    if given := [*(spell(name) for name in OF_WHOLE_VIDEOS if name in options), *others]:
        raise RefusedError(f"live and {given[0]} exclude each other; leave one out", param=given[0])
    asked = options.pop("num_frames", None)
    frames = None if asked is None else whole(asked, 1, MOST_FRAMES, spell("num_frames"))
    try:
        check_live(model.manifest, frames, "num_frames", options.get("decoder"))
    except UsageError as error:
        raise refused(error, spell, asked=["live"]) from None
    return frames
