"""The fields of a live video: its length, which need not be built, and what goes with none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from wanserve.refusal import RefusedError, whole
from wanserve.values import mistyped

if TYPE_CHECKING:
    import wanrun
    from wanserve.fields import Body

NOT_LIVE: Final = ("clips", "clip_prompts", "window_frames", "num_videos")
"""Options of a whole video."""

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


def take_live(body: Body) -> None:
    """Takes the length of a live video out of the options of a request.

    Raises:
        RefusedError: if the model makes no such length, or no live videos, and for what goes with none.
    """
    if not body.model.live:
        what = f"{body.model.name} makes a video at once, so it cannot be live"
        raise RefusedError(f"{what}; leave live out, or choose a model whose live is true", param="live")
    given: list[str] = [name for name in NOT_LIVE if name in body.options]
    given += ["seeds"] * (body.seeds is not None) + ["format"] * (body.format != "mp4")
    if given:
        name = body.spell(given[0])
        raise RefusedError(f"live and {name} exclude each other; leave one out", param=name)
    if (frames := body.options.pop("num_frames", None)) is None:
        return
    name = body.spell("num_frames")
    body.frames = whole(frames, 1, MOST_FRAMES, name)
    if body.frames != nearest_frames(body.model.manifest, body.frames):
        each = body.model.manifest.model.vae_temporal
        what = f"{name} of a live video cannot be {body.frames}"
        raise RefusedError(f"{what}; expected one more than a multiple of {each}", param=name)
