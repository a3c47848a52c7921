"""The plan as a table for people, and as JSON, with the figures of a live video."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wanbuild.plan.memory import HELD
from wanbuild.plan.meshes import Candidate, shape_text
from wanbuild.plan.plan import Plan
from wanbuild.plan.planned_generation import PlannedCalls, PlannedGeneration
from wanbuild.plan.prediction import BOUNDS, assumptions, efficiency_of
from wanrun.artifact.mesh import mesh_text
from wanrun.artifact.roles import DECODERS
from wanrun.units import in_hours

LONG = 2 * 3600.0
"""Seconds from which a time is given in hours."""

_HEADER = ("program", "calls", "TFLOP", "arguments", "temporaries", "a call", "bound by")
_WIDTHS = (-14, 6, 10, 11, 13, 10, 14)

WORDS: Mapping[str, str] = MappingProxyType(
    {"products": "matrix units", "bytes": "memory", "passes": "passes", "exchange": "links"}
)
"""The terms of a time, in words."""


def table(plan: Plan) -> list[str]:
    """Returns the plan as lines."""
    generation, chosen = plan.generation, plan.chosen
    lines = [title(plan), ""]
    if plan.others:
        lines += [*_meshes(plan.others), ""]
    if chosen.need.fits:
        lines += [_columns(_HEADER), *(_row(plan, call) for call in generation.calls), ""]
    totals = {
        "memory": _memory(plan),
        "video": _video(plan),
        **({"live": _live(live)} if (live := live_of(plan)) else {}),
        "start": _start(plan),
        "download": f"{gigabytes(weights_bytes(plan))} of weights",
        "predicted": assumptions(generation.chip),
    }
    return lines + [line for name, text in totals.items() for line in _wrapped(name, text)]


def _wrapped(name: str, text: str) -> list[str]:
    """Returns a total as lines of at most 110 characters."""
    return textwrap.wrap(f"{name:<11}{text}", 110, subsequent_indent=" " * 11)


def title(plan: Plan) -> str:
    """Returns the planned generation and its chip in one line."""
    generation = plan.generation
    return (
        f"{plan.subject.name}, {shape_text(generation.shape)}, {generation.steps} steps, on "
        f"{generation.chip.name}-{plan.devices} with {mesh_text(plan.chosen.sizes)}"
    )


def _columns(cells: Sequence[str]) -> str:
    sized = zip(cells, _WIDTHS, strict=True)
    return "".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in sized).rstrip()


def _row(plan: Plan, call: PlannedCalls) -> str:
    figures, time = plan.chosen.figures[call.name], plan.generation.time(call, plan.chosen.sizes)
    instead = f"or {plan.generation.shape.num_videos}x"  # of a decoder that a request may choose
    return _columns(
        (
            call.name,
            f"{call.times}x" if call.times else instead,
            _number(plan.generation.work[call.name].operations / 1e12),
            gigabytes(figures.arguments),
            gigabytes(figures.temporaries),
            in_seconds(time.seconds),
            WORDS[time.bound],
        )
    )


def _meshes(others: Sequence[Candidate]) -> Iterator[str]:
    """Yields a line for each mesh."""
    yield f"{'mesh':<44}{'a step':>10}{'a video':>10}{'memory':>10}"
    for one in others:
        text = f"{mesh_text(one.sizes):<44}{in_seconds(one.step):>10}{in_seconds(one.video):>10}"
        over = one.need.total - one.need.limit
        held = f"{gigabytes(over)} too much" if over > 0 else HELD[one.need.held]
        yield f"{text}{gigabytes(one.need.total):>10}  {held}"


def _memory(plan: Plan) -> str:
    need, tile = plan.chosen.need, plan.generation.options.vae_tile
    tiles = f"; --vae-tile {tile}" if tile else ""
    return (
        f"{gigabytes(need.total)} of {gigabytes(need.limit)} that may be used on a device: "
        f"weights {gigabytes(need.weights)}, beside them {gigabytes(need.working)}; {HELD[need.held]}{tiles}"
    )


def _video(plan: Plan) -> str:
    chosen, steps = plan.chosen, plan.generation.all_steps
    return f"{in_seconds(chosen.video)}, of which {steps} steps of {in_seconds(chosen.step)}"


def live_of(plan: Plan) -> LiveFigures | None:
    """Returns the figures of a live video; None for a model that makes a video at once."""
    return live_figures(plan.generation)


def _live(live: LiveFigures) -> str:
    return f"{live.rate:.3g} frames a second, the first ones {in_seconds(live.first)} after the prompt"


def start_seconds(plan: Plan) -> float:
    """Returns the seconds from the host's memory to the devices, of the weights that start there."""
    leaves_out = plan.generation.experts[0 if plan.chosen.need.held == "stream" else 1 :]
    names = [name for name in plan.generation.components if name not in leaves_out]
    if plan.chosen.need.held == "all":
        names = list(plan.generation.components)
    return plan.generation.start_seconds(plan.chosen.sizes, tuple(names))


def _start(plan: Plan) -> str:
    return f"{in_seconds(start_seconds(plan))} from the host's memory to the devices"


def weights_bytes(plan: Plan) -> int:
    """Returns the bytes of an artifact's weights."""
    return sum(component.nbytes for component in plan.generation.manifest.components.values())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def gigabytes(nbytes: float) -> str:
    """Returns bytes as ``29.3 GB``."""
    return f"{nbytes / 1e9:.1f} GB"


def in_seconds(seconds: float) -> str:
    """Returns a time as ``11.6 ms``, ``3.40 s``, ``137 s`` or ``11 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds >= LONG:
        return in_hours(seconds)
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds:,.0f} s"


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON: bytes, seconds and FLOP as numbers, all of one device."""
    generation, chosen, live = plan.generation, plan.chosen, live_of(plan)
    shape = {name: getattr(generation.shape, name) for name in generation.shape.__dataclass_fields__}
    return {
        "model": plan.subject.name,
        "variant": generation.manifest.model.variant,
        "shape": shape,
        **({"vae_tile": tile} if (tile := generation.options.vae_tile) else {}),
        "steps": generation.steps,
        "chip": generation.chip.name,
        "devices": plan.devices,
        **_mesh_json(chosen),
        **({"live": {"frames_per_second": live.rate, "first_seconds": live.first}} if live else {}),
        "start_seconds": start_seconds(plan),
        "download": {"weights_bytes": weights_bytes(plan)},
        "programs": {call.name: _program_json(plan, call) for call in generation.calls},
        "meshes": [_mesh_json(one) for one in plan.others],
        "efficiency": vars(efficiency_of(generation.chip)),
    }


def _mesh_json(one: Candidate) -> dict[str, Any]:
    memory = {
        "fits": one.need.fits,
        "held": one.need.held,
        "weights_bytes": one.need.weights,
        "working_bytes": one.need.working,
        "usable_bytes": one.need.limit,
    }
    return {"mesh": dict(one.sizes), "step_seconds": one.step, "video_seconds": one.video, "memory": memory}


def _program_json(plan: Plan, call: PlannedCalls) -> dict[str, Any]:
    figures = plan.chosen.figures[call.name]
    time = plan.generation.time(call, plan.chosen.sizes)
    return {
        "calls": call.times,
        "flop": plan.generation.work[call.name].operations,
        "argument_bytes": figures.arguments,
        "temporary_bytes": figures.temporaries,
        "seconds": time.seconds,
        "bound": time.bound,
        **{f"{name}_seconds": getattr(time, name) for name in BOUNDS},
    }


@dataclass(frozen=True)
class LiveFigures:
    """The predicted figures of a video that is made while it is watched, on one device.

    ``rate`` is frames a second, once the cache of earlier chunks is full; ``first`` is seconds from
    the prompt to the frames of the first chunk, with all weights on the device.
    """

    rate: float
    first: float


def live_figures(generation: PlannedGeneration) -> LiveFigures | None:
    """Returns the figures of a live video; None for a model that makes a video at once."""
    model = generation.manifest.model
    if (chunks := model.chunks) is None:
        return None

    def seconds(calls: Iterable[PlannedCalls]) -> float:
        return sum(generation.time(call, {}).seconds for call in calls)

    def steps(frames: int) -> float:
        return generation.steps * seconds(call for call in generation.makers if call.frames == frames)

    decoders = [call for call in generation.during("video") if call.role in DECODERS["full"]]
    *begins, following = decoders
    piece, own = seconds([following]), generation.pieces(following.name, chunks.first)
    first = later = seconds(begins) + own * piece
    if not chunks.alone:
        later = generation.pieces(following.name, chunks.each, further=True) * piece
    keeping = seconds(call for call in generation.during("steps") if call not in generation.makers)
    before = seconds(generation.during("prompts", "expert"))
    return LiveFigures(
        rate=model.chunk_frames / (steps(chunks.each) + keeping + later),
        first=before + steps(chunks.first) + first,
    )
