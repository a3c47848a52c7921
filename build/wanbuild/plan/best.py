"""The fastest settings that this project knows for a chip: one choice after the other, with its gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from wanbuild.build_options import PlanRequest
from wanbuild.conversion.chosen import Quantise, parse_quantise
from wanbuild.plan.plan import Plan, make_plan, parse_chip
from wanbuild.plan.plan_report import gigabytes, in_seconds, title
from wanbuild.plan.subject import Subject
from wanbuild.targets.chip import Chip
from wanbuild.targets.parsing import ChipName
from wanrun import EIGHT_BITS
from wanrun.artifact.mesh import mesh_text
from wanrun.artifact.target_names import W8A8, split_w8a8
from wanrun.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """A choice added to those before it, as a user gives it, with the measured loss of quality.

    The loss is that of the trained tiny models (benchmarks/RESULTS.md). ``quantise`` is the dtype of the
    layers' weights; products are of 8 bits too. ``steps`` are without guidance; None for the model's own.
    """

    given: str
    quality: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quantise: str | None = None
    steps: int | None = None


def settings(chip: Chip) -> Iterator[Setting]:
    """Yields the choices for a chip, of which each costs more than those before it."""
    name, _ = split_w8a8(chip.name)
    yield Setting("as published", "")
    yield Setting("--vae-dtype bfloat16", "55 dB from float32", {"vae_dtype": "bfloat16"})
    measured = [one for one in EIGHT_BITS.values() if one.quality]
    fastest = max(measured, key=lambda one: chip.eight_bit_rate(one.dtype))
    if chip.eight_bit_rate(fastest.dtype) > chip.bf16:
        given = f"--quantise {fastest.name}, --target {name}{W8A8}"
        yield Setting(given, fastest.quality, quantise=fastest.name)
    yield Setting("--lora FILE, --sampling lightning-4", "another model's videos", steps=4)


@dataclass(frozen=True)
class Best:
    """A setting, with all before it, and its plan."""

    setting: Setting
    plan: Plan


def best_settings(subject_of: Callable[[Quantise | None], Subject], request: PlanRequest) -> Sequence[Best]:
    """Returns the settings of which each is faster than the one before, with their plans by formula.

    ``subject_of`` returns the subject with layers in 8 bits; ``request`` has the chip and the options that
    all settings share. Raises UsageError as ``make_plan`` does, if no setting can be planned.
    """
    chip, count = parse_chip(request.target)
    found: list[Best] = []
    refused: UsageError | None = None
    quantise: Quantise | None = None
    for setting in settings(chip):
        asked, kept = _with(request, setting, ChipName(chip, count)), quantise
        if setting.quantise is not None:
            kept = parse_quantise(setting.quantise, ())
        try:
            plan = make_plan(subject_of(kept), asked)
        except UsageError as error:
            refused = error
            continue
        if not found or plan.chosen.video < found[-1].plan.chosen.video:
            found.append(Best(setting, plan))
            request, quantise = asked, kept
    if not found and refused is not None:
        raise refused
    return found


def _with(request: PlanRequest, setting: Setting, named: ChipName) -> PlanRequest:
    """Returns a request with one setting more."""
    target = request.target
    if setting.quantise is not None and not named.chip.kernels.w8a8:
        target = ChipName(named.chip.in_eight_bits(), named.count).text
    choices, steps = {**request.choices, **setting.options}, request.steps
    if setting.steps is not None:
        choices, steps = {**choices, "guidance": False}, setting.steps
    return replace(request, target=target, choices=choices, steps=steps)


def best_lines(found: Sequence[Best]) -> list[str]:
    """Returns settings as lines."""
    lines = [title(found[0].plan), "", f"{'with all above':<44}{'memory':>10}{'a step':>11}{'a video':>11}"]
    for one in found:
        chosen = one.plan.chosen
        step, video = in_seconds(chosen.step), in_seconds(chosen.video)
        figures = f"{gigabytes(chosen.need.total):>10}{step:>11}{video:>11}"
        lines.append(f"{one.setting.given:<44}{figures}  {one.setting.quality}".rstrip())
    last = found[-1].plan
    mesh = f"--mesh {mesh_text(last.chosen.sizes)}, " if last.chosen.sizes else ""
    lines += ["", f"predicted by formula, not measured; {mesh}weights held: {last.chosen.need.held}"]
    return lines


def best_json(found: Sequence[Best]) -> list[dict[str, Any]]:
    """Returns settings as JSON."""
    return [
        {
            "setting": one.setting.given,
            "quality": one.setting.quality,
            "mesh": dict(one.plan.chosen.sizes),
            "held": one.plan.chosen.need.held,
            "memory_bytes": one.plan.chosen.need.total,
            "step_seconds": one.plan.chosen.step,
            "video_seconds": one.plan.chosen.video,
        }
        for one in found
    ]
