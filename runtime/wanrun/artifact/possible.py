"""Sizes and numbers of frames that a model can have, and the nearest ones to any other."""

from __future__ import annotations

__all__ = ["check_in_chunks", "check_possible"]

from itertools import product

from wanrun.artifact.model import Model
from wanrun.errors import UsageError, field


def check_possible(
    model: Model, size: tuple[int, int] | None, num_frames: int | None, name: str = "num_frames"
) -> None:
    """Checks that programs of a model can be built for a shape.

    Args:
        model: the model.
        size: (width, height) in pixels; None for any.
        num_frames: frames of a video; None for any.
        name: the option that says them.

    Raises:
        UsageError: naming the nearest shapes that can be built.
    """
    if size is not None and (sizes := nearest_sizes(model, size)) != [size]:
        raise UsageError(
            "unsupported",
            f"{field('size')} {_written(size)} cannot be built",
            expected=f"multiples of {model.size_multiple}",
            remedy=f"use {' or '.join(map(_written, sizes))}",
        )
    if num_frames is not None and (frames := nearest_frames(model, num_frames)) != [num_frames]:
        least, reason = fewest_frames(model)
        why = f", and at least {least}" + (f": {reason}" if reason else "") if num_frames < least else ""
        raise UsageError(
            "unsupported",
            f"{field(name)} {num_frames} cannot be built",
            expected=f"{model.vae_temporal}n + 1{why}",
            remedy=f"use {' or '.join(map(str, frames))}",
        )


def check_in_chunks(model: Model, num_videos: int, guidance: bool) -> None:
    """Checks that a model of chunks makes so many videos at once, and has guidance if that is asked for.

    Args:
        model: the model.
        num_videos: videos of a prompt.
        guidance: whether steps have guidance.

    Raises:
        UsageError: for what no profile of it can have.
    """
    if model.chunks is None:
        return
    if guidance and not model.guided:
        raise UsageError(
            "unsupported",
            f"{model.variant} has guidance in its weights, and none in its steps",
            remedy=f"pass {field('guidance_scale')} 1, or leave it out",
        )
    if num_videos > 1:
        raise UsageError(
            "unsupported",
            f"{model.variant} makes a video in chunks, one video at a time",
            found=f"{field('num_videos')} {num_videos}",
            remedy="make the others with other seeds",
        )


def nearest_sizes(model: Model, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the two nearest sizes that a model can have, the nearest first; only the size if it can."""

    def distance(other: tuple[int, int]) -> int:
        return (other[0] - size[0]) ** 2 + (other[1] - size[1]) ** 2

    widths, heights = (_around(length, model.size_multiple) for length in size)
    return sorted(product(widths, heights), key=distance)[:2]


def fewest_frames(model: Model) -> tuple[int, str]:
    """Returns the fewest frames of a profile, and why; diffusers fails with fewer if two images are given."""
    task = model.task
    if task.windows is not None:
        shared = max(task.windows.overlaps)
        return shared, f"a segment may begin with {shared} of the one before"
    images = [name for name, item in task.inputs.items() if item.kind == "image"]
    # The first frame is a separate latent frame; any other image needs one more.
    return (1 + model.vae_temporal, f"{' and '.join(images)} may be given") if len(images) > 1 else (1, "")


def nearest_frames(model: Model, num_frames: int) -> list[int]:
    """Returns the nearest numbers of frames below and above; only the number if it is possible."""
    step, (least, _) = model.vae_temporal, fewest_frames(model)
    latents = _around(num_frames - 1 + step, step)  # one for the first frame
    return list(dict.fromkeys(max((count - step) + 1, least) for count in latents))


def _around(length: int, multiple: int) -> list[int]:
    """Returns the multiples below and above a length, at least one; one if it is a multiple."""
    below, above = length // multiple * multiple, -(-length // multiple) * multiple
    return list(dict.fromkeys(max(one, multiple) for one in (below, above)))


def _written(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
