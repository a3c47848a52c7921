"""The fields of a live video: its length, which need not be built, and what goes with none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from wanrun.request.values import OF_WHOLE_VIDEOS
from wanserve.catalog import Model
from wanserve.refusal import RefusedError, whole
from wanserve.values import mistyped

if TYPE_CHECKING:
    import wanrun

MOST_FRAMES: Final = 10**9


def is_live(value: Any) -> bool:
    """Returns what the field says, also as a form has it. Raises RefusedError for another value."""
    if value not in (True, False, "true", "false") or type(value) is int:
        raise mistyped("live", "true or false", value)
    return value in (True, "true")


def nearest_frames(manifest: wanrun.Manifest, frames: float) -> int:
    """Returns the number of frames that a model makes which is next to this one."""
    each = manifest.model.vae_temporal
    return 1 + each * max(round((frames - 1) / each), 0)


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
    if not model.live:
        what = f"{model.name} makes a video at once, so it cannot be live"
        raise RefusedError(f"{what}; leave live out, or choose a model whose live is true", param="live")
    if given := [*(spell(name) for name in OF_WHOLE_VIDEOS if name in options), *others]:
        raise RefusedError(f"live and {given[0]} exclude each other; leave one out", param=given[0])
    if (asked := options.pop("num_frames", None)) is None:
        return None
    name, each = spell("num_frames"), model.manifest.model.vae_temporal
    frames = whole(asked, 1, MOST_FRAMES, name)
    if frames != nearest_frames(model.manifest, frames):
        what = f"{name} of a live video cannot be {frames}"
        raise RefusedError(f"{what}; expected one more than a multiple of {each}", param=name)
    return frames
