"""The meshes of a number of devices, the fastest first, and alternatives if none of them fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from wanbuild.models.tiles import TILE
from wanbuild.plan.memory import Figures, Need, estimated, need
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.prediction import transfer_seconds
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import mesh_problem, meshes
from wanrun.artifact.mesh import Sizes, mesh_text
from wanrun.errors import UsageError


@dataclass(frozen=True)
class Candidate:
    """A mesh, as devices by axis, and what a generation is predicted to need and take on it.

    ``step`` and ``video`` are seconds of a denoising step and of a generation; ``need`` is the memory of a
    device, and ``figures`` are the bytes of its programs, by name.
    """

    sizes: Sizes
    step: float
    video: float
    need: Need
    figures: Mapping[str, Figures]


def candidate_meshes(generation: PlannedGeneration, count: int) -> list[Candidate]:
    """Returns all meshes of exactly this many devices: first those that fit, the fastest first.

    Of those that do not fit, the one that needs least comes first.
    """
    config = generation.step.config
    works = [
        candidate(generation, sizes)
        for sizes in meshes(count)
        if mesh_problem(sizes, config, generation.shape, count, generation.options.nag) is None
    ]
    return sorted(works, key=lambda one: (not one.need.fits, one.video if one.need.fits else one.need.total))


def candidate(generation: PlannedGeneration, sizes: Sizes) -> Candidate:
    """Returns the prediction for one mesh, by formula."""
    figures = estimated(generation, sizes)
    found = need(generation, sizes, figures)
    step = step_seconds(generation, sizes, found)
    return Candidate(sizes, step, video_seconds(generation, sizes, found), found, figures)


def step_seconds(generation: PlannedGeneration, sizes: Sizes, found: Need | None = None) -> float:
    """Returns the mean seconds of a step: the larger of computing and bringing layers that stream."""
    seconds = 0.0
    if found is not None and found.held == "stream":
        seconds = transfer_seconds(generation.layers_bytes, generation.layers_bytes, 1, generation.chip)
    computed = sum(generation.time(call, sizes).seconds * call.times for call in generation.makers)
    return max(seconds, computed / generation.all_steps)


def video_seconds(generation: PlannedGeneration, sizes: Sizes, found: Need) -> float:
    """Returns the seconds of a generation, without the start.

    Where not all weights are held, both experts and the text encoder are transferred once more.
    """
    others = (call for call in generation.calls if call not in generation.makers)
    total = sum(generation.time(call, sizes).seconds * call.times for call in others)
    total += generation.all_steps * step_seconds(generation, sizes, found)
    moved = found.held in ("one", "low") and len(generation.experts) > 1
    leaving = generation.experts if moved else ()
    leaving = (*leaving, "text_encoder") if found.held in ("low", "stream") else leaving
    return total + generation.start_seconds(sizes, leaving)


def refusal(
    generation: PlannedGeneration,
    count: int,
    best: Candidate,
    sizes: Sequence[tuple[int, int]],
) -> UsageError:
    """Returns the error for a generation that fits no mesh of ``count`` devices.

    ``best`` is the mesh that needs least, or the one that was asked for; ``sizes`` are those that the model
    is made for.
    """
    limit, total = best.need.limit, best.need.total
    remedies = list(_more_devices(generation, count))
    if best.need.weights <= limit:
        remedies += _smaller(generation, count, sizes)
    return UsageError(
        "too_large",
        f"{shape_text(generation.shape)} does not fit {generation.chip.name} with {mesh_text(best.sizes)}",
        expected=f"at most {limit / 1e9:.1f} GB on a device (of {generation.chip.memory_bytes / 1e9:.1f} GB)",
        found=f"{total / 1e9:.1f} GB, {(total - limit) / 1e9:.1f} GB too much",
        remedy="what fits: " + "; ".join(remedies) if remedies else "nothing that was tried fits this chip",
    )


def _more_devices(generation: PlannedGeneration, count: int) -> Iterator[str]:
    """Yields the least number of devices that would fit, with their fastest mesh; first, another mesh."""
    chip = generation.chip
    for devices in (count, *(n for n in chip.counts if n > count)):
        if (found := _fitting(generation, devices)) is not None:
            mesh = f" --mesh {mesh_text(found.sizes)}" if found.sizes else ""
            yield f"--target {chip.name}-{devices}{mesh}"
            return


def in_tiles(generation: PlannedGeneration, count: int) -> PlannedGeneration | None:
    """Returns a generation whose VAE works in tiles, if it fits only so: on one device, not in chunks."""
    if count > 1 or generation.options.vae_tile or generation.chunked:
        return None
    tiled = dataclasses.replace(generation, options=structs.replace(generation.options, vae_tile=TILE))
    return tiled if _fitting(tiled, count) is not None else None


def _smaller(generation: PlannedGeneration, count: int, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yields another dtype, the largest smaller size and the most frames that would fit."""
    shape, options = generation.shape, generation.options
    for name in ("dtype", "vae_dtype"):
        if getattr(options, name) == "float32":
            narrow: dict[str, Any] = {name: "bfloat16"}
            less = dataclasses.replace(generation, options=structs.replace(options, **narrow))
            if _fitting(less, count) is not None:
                yield f"--{name.replace('_', '-')} bfloat16"
    for width, height in sorted(sizes, key=lambda size: -size[0] * size[1]):
        if width * height < shape.width * shape.height:
            smaller = dataclasses.replace(shape, width=width, height=height)
            if _fitting(dataclasses.replace(generation, shape=smaller), count) is not None:
                yield f"--size {width}x{height}"
                break
    temporal = generation.manifest.model.vae_temporal
    for frames in range(shape.num_frames - temporal, temporal, -4 * temporal):
        shorter = dataclasses.replace(generation, shape=dataclasses.replace(shape, num_frames=frames))
        if _fitting(shorter, count) is not None:
            yield f"--frames {frames}"
            break


def _fitting(generation: PlannedGeneration, count: int) -> Candidate | None:
    """Returns the fastest mesh of this many devices that fits."""
    found = candidate_meshes(generation, count)
    return found[0] if found and found[0].need.fits else None


def shape_text(shape: Shape) -> str:
    """Returns a shape in words."""
    pair = "guidance" if shape.guidance else "no guidance"
    videos = f", {shape.num_videos} videos" if shape.num_videos > 1 else ""
    return f"{shape.width}x{shape.height}x{shape.num_frames} with {pair}{videos}"
