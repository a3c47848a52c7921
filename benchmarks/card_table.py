"""The pages' tables of what chips are planned to do, by ``wanbuild plan``'s formula: this writes them anew.

Every chip of the table of chips has its row. It takes some minutes.

    python benchmarks/card_table.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from plan_table import COLUMNS, MODELS, disk_of, row
from wanbuild.build_options import PlanRequest
from wanbuild.conversion.chosen import parse_quantise
from wanbuild.plan.plan import Plan, make_plan
from wanbuild.plan.subject import Subject, read_subject
from wanbuild.targets.chip import GIB, Chip
from wanbuild.targets.chips import CHIPS
from wanrun.artifact.target_names import W8A8
from wanrun.errors import UsageError

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- cards: benchmarks/card_table.py writes this table: {} -->\n"
END = "<!-- end of cards -->\n"

SMALL = 32 * GIB
"""The most memory of a small card."""

SIZES = tuple((model, size) for model, sizes in MODELS.items() for size in sizes)
SMALL_SIZES = tuple(one for one in SIZES if one[0] != "wan2.2-t2v-a14b")
LARGE = ("h100", "h200", "v6e-8", "v7x-8")
HELD = {"one": "one expert at a time", "stream": "streams"}
NAMES = {"wan2.1-t2v-1.3b": "2.1 T2V 1.3B", "wan2.2-ti2v-5b": "2.2 TI2V 5B", "wan2.1-t2v-14b": "2.1 T2V 14B"}


@functools.cache
def subject(model: str, quantise: str | None) -> Subject:
    """Returns a published model, with weights of 8 bits if ``quantise`` says so."""
    return read_subject(model, parse_quantise(quantise, ()))


@functools.cache
def planned(model: str, size: tuple[int, int], target: str, quantise: str | None = None) -> Plan | None:
    """Returns a plan; None for what does not fit."""
    try:
        return make_plan(subject(model, quantise), PlanRequest(target, {"sizes": size}))
    except UsageError:
        return None


def small_cards() -> list[Chip]:
    """Returns the cards of at most ``SMALL`` bytes, and two TPUs, the largest first."""
    cards = [chip for chip in CHIPS.values() if chip.platform == "cuda" and chip.memory_bytes <= SMALL]
    cards.sort(key=lambda chip: (chip.memory_bytes, chip.bf16), reverse=True)
    return [*cards, CHIPS["v6e"], CHIPS["v5e"]]


def everything() -> Iterator[list[str]]:
    """One row for each model, size and chip: a GPU, and eight devices of a TPU."""
    for model, size in SIZES:
        first = [model, disk_of(subject(model, None)), f"{size[0]}x{size[1]}"]
        for chip in CHIPS.values():
            target = f"{chip.name}-8" if chip.platform == "tpu" else chip.name
            plan = planned(model, size, target)
            yield [*first, target, *(row(plan) if plan else ["does not fit", *[""] * 5])]


def _cell(plan: Plan | None, video: bool = True) -> str:
    if plan is None:
        return "no"
    chosen, tile = plan.chosen, plan.generation.options.vae_tile
    step = f"{chosen.step:.0f}" if chosen.step >= 10 else f"{chosen.step:.1f}"
    times = [f"{step} s", *([f"{_minutes(plan)} min"] if video else ())]
    how = [*filter(None, [HELD.get(chosen.need.held)]), *(["tiles"] if tile else ())]
    return ", ".join([f"{chosen.need.total / 1e9:.1f}", *times, *how])


def _minutes(plan: Plan) -> str:
    minutes = plan.chosen.video / 60
    return f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}"


def _with_held(plan: Plan, cell: str) -> str:
    """Returns a cell, with how weights are held where they do not all stay."""
    return ", ".join(filter(None, [cell, HELD.get(plan.chosen.need.held)]))


def _named(chip: Chip) -> str:
    return f"{chip.name}, {chip.memory_bytes // GIB} GB"


def small(quantise: str | None, suffix: str, video: bool) -> Iterator[list[str]]:
    """One row for each small card: memory, a step, and a video if asked for."""
    for chip in small_cards():
        target = f"{chip.name}{suffix}"
        plans = (planned(model, size, target, quantise) for model, size in SMALL_SIZES)
        yield [_named(chip), *(_cell(plan, video) for plan in plans)]


def minutes() -> Iterator[list[str]]:
    """One row for each small card: minutes of a video of 1.3B and of 14B, and of 14B in 8 bits."""
    size, large = (832, 480), "wan2.1-t2v-14b"
    for chip in small_cards():
        plans = (
            planned("wan2.1-t2v-1.3b", size, chip.name),
            planned(large, size, chip.name),
            planned(large, size, f"{chip.name}{W8A8}", "int8"),
        )
        yield [_named(chip), *("no" if plan is None else _with_held(plan, _minutes(plan)) for plan in plans)]


def large() -> Iterator[list[str]]:
    """One row for each model and size: memory, and the time of a video, on ``LARGE``."""
    for model, size in SIZES:
        cells = [model, disk_of(subject(model, None)), f"{size[0]}x{size[1]}"]
        for target in LARGE:
            if (plan := planned(model, size, target)) is not None:
                seconds, need = plan.chosen.video, plan.chosen.need
                time = f"{_minutes(plan)} min" if seconds >= 100 else f"{seconds:.0f} s"
                low = ", `--memory low`" if need.held == "low" else ""
                cells.append(_with_held(plan, f"{need.total / 1e9:.0f} GB, {time}{low}"))
        yield cells


def _heads() -> list[str]:
    return ["card", *(f"{NAMES[model]}, {width}x{height}" for model, (width, height) in SMALL_SIZES)]


TABLES: Mapping[str, tuple[Path, Callable[[], Iterable[list[str]]]]] = {
    "minutes": (
        ROOT / "README.md",
        lambda: [["card", "1.3B, bfloat16", "14B, bfloat16", "14B, int8 weights and products"], *minutes()],
    ),
    "bfloat16": (ROOT / "docs/small-cards.md", lambda: [_heads(), *small(None, "", True)]),
    "int8": (ROOT / "docs/small-cards.md", lambda: [_heads(), *small("int8", W8A8, False)]),
    "large": (
        ROOT / "docs/planning.md",
        lambda: [["model", "on disk", "size", *(f"one {name}" for name in LARGE[:2]), *LARGE[2:]], *large()],
    ),
    "everything": (ROOT / "benchmarks/RESULTS.md", lambda: [list(COLUMNS), *everything()]),
}
"""Each table by its name: the page, and its rows, the first of which are heads."""


def write(name: str) -> None:
    """Writes a table into its page.

    Raises:
        LookupError: if the page has no place for it.
    """
    page, rows = TABLES[name]
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LookupError(f"{page} has no place for a table: {BEGIN.format(name).strip()}")
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows()]
    lines.insert(1, f"|{'---|' * (lines[0].count('|') - 1)}\n")
    page.write_text(before + begin + "".join(lines) + end + after, encoding="utf-8")


def main() -> None:
    for name in TABLES:
        write(name)


if __name__ == "__main__":
    main()
