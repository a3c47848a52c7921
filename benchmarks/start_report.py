"""Reports start.py's measurements: medians, ratios, aims and verdicts as a table and one JSON line."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Run = Mapping[str, Any]
Figure = Callable[[Run], float | None]
STATES = ("warm", "cold")
FLOORS = {"numpy": "np.empty as it comes", "small": "4 KiB pages"}
EMPTY_COMPILE_CACHE = "empty compile cache"
TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: the figure's name.
        unit: unit of the values.
        values: by cache state; None if not measured.
        aim: the bound, and whether values should be at most or at least it.
    """

    name: str
    unit: str
    values: Mapping[str, float | None]
    aim: float | None = None
    at_least: bool = False

    def verdict(self, state: str) -> str:
        """Returns 'met', 'missed', or '' without an aim or a value."""
        value = self.values.get(state)
        if value is None or self.aim is None:
            return ""
        return "met" if (value >= self.aim if self.at_least else value <= self.aim) else "missed"

    def __str__(self) -> str:
        cells = [self.values.get(state) for state in STATES]
        shown = [f"{'' if cell is None else f'{cell:.3f}':>9}" for cell in cells]
        bound = "" if self.aim is None else f"{'>=' if self.at_least else '<='} {self.aim:g}"
        verdicts = " / ".join(filter(None, (self.verdict(state) for state in STATES)))
        return f"{self.name:<58} {shown[0]} {shown[1]} {self.unit:<5} {bound:<8} {verdicts}".rstrip()


def restore_seconds(run: Run) -> float | None:
    """Returns the time from the first read until the last byte needed to be ready."""
    needed = {f"restore {name}" for name in ("text_encoder", "transformer")}
    spans = [(start, end) for name, start, end in run["timing"]["spans"] if name in needed]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else None


def steady_step(run: Run) -> float:
    """Returns the seconds of wanrun's third step, or of diffusers' second.

    The first step includes the first touch of memory; wanrun restores its VAE during the second.
    """
    return run["timing"]["step_seconds"][2] if run["who"] == "wanrun" else run["step_seconds"][0]


def first_step_end(run: Run) -> float:
    """Returns the end of the first step, from the start of the process."""
    if run["who"] == "wanrun":
        return run["timing"]["process_to_first_step_seconds"]
    return run["start_to_first_step_seconds"]


def ready_moment(run: Run) -> float:
    """Returns the moment of ready, from the start of the process."""
    return run["timing"]["process_to_ready_seconds"]


def first_beyond_steady(run: Run) -> float:
    """Returns the first step's time beyond a steady step's."""
    return run["timing"]["step_seconds"][0] - steady_step(run)


def before_steady(run: Run) -> float:
    """Returns the end of the first step less one steady step: the cost of a start."""
    return first_step_end(run) - steady_step(run)


def timing(name: str) -> Figure:
    """Returns a figure of wanrun's own timings."""
    return lambda run: run["timing"][name]


def figure(name: str) -> Figure:
    """Returns a figure of the run itself."""
    return lambda run: run.get(name)


class Medians:
    """Medians over the runs of one kind."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def of(self, part: str, who: str, variant: str, state: str) -> list[Run]:
        """Returns the runs of this kind, in order."""
        kind = (part, who, variant, state)
        return [run for run in self._runs if (run["part"], run["who"], run["variant"], run["cache"]) == kind]

    def values(
        self, figure: Figure, part: str, who: str, variant: str = "encoded"
    ) -> dict[str, float | None]:
        """Returns the median of a figure by cache state."""
        medians: dict[str, float | None] = {}
        for state in STATES:
            found = [figure(run) for run in self.of(part, who, variant, state)]
            values = [value for value in found if value is not None]
            medians[state] = statistics.median(values) if values else None
        return medians


def ratio(
    above: Mapping[str, float | None], below: Mapping[str, float | None], scale: float = 1
) -> dict[str, float | None]:
    """Returns one median divided by another, where both were measured."""
    result: dict[str, float | None] = {}
    for state in STATES:
        first, second = above.get(state), below.get(state)
        result[state] = None if first is None or not second else first / second * scale
    return result


def extreme(choose: Callable[[list[float]], float], rows: Mapping[str, Mapping[str, float | None]]) -> Any:
    """Returns the smallest or largest of several medians, by cache state."""
    result: dict[str, float | None] = {}
    for state in STATES:
        values = [value for row in rows.values() if (value := row.get(state)) is not None]
        result[state] = choose(values) if values else None
    return result


def cpu_rows(medians: Medians, part: str, who: str, variant: str) -> list[Row]:
    """Returns the CPU seconds of all threads; the first touch of memory counts as system time."""
    names = {"CPU, user": "cpu_user_seconds", "CPU, system": "cpu_system_seconds"}
    return [
        Row(f"  {label}", "s", medians.values(figure(name), part, who, variant))
        for label, name in names.items()
    ]


def start_rows(medians: Medians, variant: str) -> list[Row]:
    """Returns floor, ready and restore of one variant of a start."""
    name, rows = f", {variant}", []
    floors = {pages: medians.values(figure("floor_seconds"), "floor", pages, variant) for pages in FLOORS}
    ready = medians.values(ready_moment, "ready", "wanrun", variant)
    seconds = medians.values(restore_seconds, "ready", "wanrun", variant)
    nbytes = medians.values(figure("bytes"), "floor", "numpy", variant)
    rate = ratio(nbytes, seconds, 1e-9)
    parts = {"interpreter": "interpreter", "import jax": "import_jax", "parallel read": "read"}
    rows.append(Row(f"floor{name}", "s", floors["numpy"]))
    for label, part in parts.items():
        values = medians.values(figure(f"{part}_seconds"), "floor", "numpy", variant)
        rows.append(Row(f"  {label}", "s", values))
    rows += cpu_rows(medians, "floor", "numpy", variant)
    rows.append(Row(f"floor{name}, 4 KiB pages", "s", floors["small"]))
    rows += cpu_rows(medians, "floor", "small", variant)
    rows.append(Row(f"process start to ready{name}", "s", ready))
    rows += cpu_rows(medians, "ready", "wanrun", variant)
    rows.append(Row("  by the faster floor", "", ratio(ready, extreme(min, floors)), 1.3))
    io_bytes = medians.values(figure("io_bytes"), "ready", "wanrun", variant)
    rows.append(Row("  read until ready, all files", "GB", ratio(io_bytes, dict.fromkeys(STATES, 1e9))))
    rows.append(
        Row("  bytes of the components that are needed", "GB", ratio(nbytes, dict.fromkeys(STATES, 1e9)))
    )
    rows.append(Row("  restore", "s", seconds))
    rows.append(Row("  restore rate, beside everything else", "GB/s", rate))
    alone = {pages: medians.values(figure("read_gb_per_second"), "floor", pages, variant) for pages in FLOORS}
    for pages, label in FLOORS.items():
        rows.append(Row(f"  parallel read rate alone, {label}", "GB/s", alone[pages]))
    rows.append(Row("  restore rate by the faster", "", ratio(rate, extreme(max, alone)), 0.8, at_least=True))
    return rows


def peer_rows(medians: Medians) -> list[Row]:
    """Returns diffusers' own starts and steps."""
    rows = []
    for who, label in (("eager", "diffusers"), ("compiled", "diffusers compiled")):
        end = medians.values(first_step_end, "step", who)
        rows.append(Row(f"{label}: process start to end of first step", "s", end))
        for part in ("import", "load", "text"):
            rows.append(Row(f"  {part}", "s", medians.values(figure(f"{part}_seconds"), "step", who)))
        rows.append(Row("  less one steady step", "s", medians.values(before_steady, "step", who)))
        rows.append(Row("  steady step", "s", medians.values(steady_step, "step", who)))
    end = medians.values(first_step_end, "step", "compiled", EMPTY_COMPILE_CACHE)
    return [*rows, Row("diffusers compiled, compile cache empty: end of first step", "s", end)]


def step_rows(medians: Medians, variants: Sequence[str]) -> list[Row]:
    """Returns first and steady steps, and diffusers'."""
    rows = peer_rows(medians)
    start = {who: medians.values(before_steady, "step", who) for who in ("eager", "compiled")}
    start["empty"] = medians.values(before_steady, "step", "compiled", EMPTY_COMPILE_CACHE)
    steady = {who: medians.values(steady_step, "step", who) for who in ("eager", "compiled")}
    for variant in variants:
        kind = ("step", "wanrun", variant)
        ours, step = medians.values(before_steady, *kind), medians.values(steady_step, *kind)
        text, beyond = timing("text_seconds"), first_beyond_steady
        rows += [
            Row(f"process start to end of first step, {variant}", "s", medians.values(first_step_end, *kind)),
            Row("  less one steady step", "s", ours),
            Row("    of which until ready", "s", medians.values(ready_moment, *kind)),
            Row("    of which text", "s", medians.values(text, *kind)),
            Row("    of which the first step beyond a steady one", "s", medians.values(beyond, *kind)),
            Row("  by diffusers'", "", ratio(ours, start["eager"]), 0.25),
            Row("  by diffusers' compiled, warm compile cache", "", ratio(ours, start["compiled"]), 0.1),
            Row("  by diffusers' compiled, empty compile cache", "", ratio(ours, start["empty"]), 0.1),
            Row("  steady step", "s", step),
            Row("  by diffusers'", "", ratio(step, steady["eager"]), 1.05),
            Row("  by diffusers' compiled", "", ratio(step, steady["compiled"])),
        ]
    return rows


def decode_rows(medians: Medians) -> list[Row]:
    """Returns the VAE's decode, diffusers' decode, and the starts of those whole runs."""
    ours = medians.values(timing("decode_seconds"), "decode", "wanrun")
    theirs = medians.values(figure("decode_seconds"), "decode", "eager")
    return [
        Row("VAE decode, float32", "s", ours),
        Row("  diffusers'", "s", theirs),
        Row("  by diffusers'", "", ratio(ours, theirs), 0.85),
        Row(
            "  process start to ready of those whole runs",
            "s",
            medians.values(ready_moment, "decode", "wanrun"),
        ),
    ]


def small_rows(medians: Medians, runs: Sequence[Run]) -> list[Row]:
    """Returns the command line's help, imports, misses, traces and the step loop."""
    imported = medians.values(figure("import_seconds"), "imports", "wanrun", "")
    jax = medians.values(figure("import_seconds"), "imports", "jax", "")
    between = medians.values(figure("between_steps_seconds"), "overhead", "wanrun", "toy")
    told = medians.values(figure("loop_overhead_seconds"), "overhead", "wanrun", "toy")
    step = medians.values(figure("toy_step_seconds"), "overhead", "wanrun", "toy")
    counted = [run["timing"] for run in runs if run["who"] == "wanrun" and "timing" in run]
    milli = dict.fromkeys(STATES, 1e-3)
    rows = [
        Row("wanrun --help", "s", medians.values(figure("wall_seconds"), "help", "wanrun", ""), 0.25),
        Row("import jax", "s", jax),
        Row("import of all that a start needs", "s", imported),
        Row("  by import jax", "", ratio(imported, jax), 1.2),
        Row("Python between two steps, on the toy", "ms", ratio(between, milli), 1),
        Row("  as wanrun itself tells", "ms", ratio(told, milli), 1),
        Row("  a step of the toy", "ms", ratio(step, milli)),
    ]
    if counted:
        misses = float(max(one["cache_misses"] for one in counted))
        hits = float(min(one["cache_hits"] for one in counted))
        rows += [
            Row(f"compilation cache misses, most of {len(counted)} runs", "", {"warm": misses}, 0),
            Row("compilation cache hits, fewest", "", {"warm": hits}),
        ]
    return [*rows, *trace_rows(runs)]


def trace_rows(runs: Sequence[Run]) -> list[Row]:
    """Returns JAX's report of the traced run: each program's wrapper once, nothing else."""
    rows = []
    for run in runs:
        if run["part"] != "traces":
            continue
        by_event: dict[str, list[tuple[str, float]]] = {}
        for event, name, seconds in run["events"]:
            by_event.setdefault(event, []).append((name, seconds))
        for event, found in sorted(by_event.items()):
            rows.append(Row(f"{event}: {len(found)} times", "s", {"warm": sum(s for _, s in found)}))
        traced = [name for name, _ in by_event.get(TRACE_EVENT, [])]
        model = {"warm": float(len([name for name in traced if name not in run["programs"]]))}
        again = {"warm": float(len(traced) - len(set(traced)))}
        loaded = {"warm": float(len(run["build_packages"]))}
        rows.append(Row(f"traces of anything but wrappers ({', '.join(sorted(traced))})", "", model, 0))
        rows.append(Row("traces of the same program again", "", again, 0))
        rows.append(Row("packages of the build or of readers that were imported", "", loaded, 0))
    return rows


def waterfall(medians: Medians, part: str, variant: str, state: str) -> list[str]:
    """Returns the spans of the median run until ready, or until the second step."""
    moment = ready_moment if part == "ready" else first_step_end
    runs = medians.of(part, "wanrun", variant, state)
    if not runs:
        return []
    run = sorted(runs, key=moment)[len(runs) // 2]
    what = "until ready" if part == "ready" else "to the end of the first step"
    lines = [f"the median start {what}, {variant}, {state} cache: {moment(run):.3f} s"]
    for name, start, end in run["timing"]["spans"]:
        lines.append(f"  {start:7.3f} to {end:7.3f}  {end - start:7.3f}  {name}")
    return lines


def report(runs: Sequence[Run], notes: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Returns the table, the waterfalls and, last, one JSON line with every run."""
    medians = Medians(runs)
    variants = [name for name in ("encoded", "stored") if any(run["variant"] == name for run in runs)]
    rows = [row for variant in variants for row in start_rows(medians, variant)]
    rows += [*step_rows(medians, variants), *decode_rows(medians), *small_rows(medians, runs)]
    rows = [row for row in rows if any(value is not None for value in row.values.values())]
    residents = {
        state: [run["resident"] for run in runs if run["cache"] == state and "resident" in run]
        for state in STATES
    }
    lines = [f"{'':<58} {'warm':>9} {'cold':>9} {'':<5} {'aim':<8} verdict", *map(str, rows)]
    for state, found in residents.items():
        if found:
            lines.append(
                f"page cache {state}: {min(found):.4f} to {max(found):.4f} of the pages were resident"
            )
    for variant in variants:
        for part, state in itertools.product(("ready", "step"), STATES):
            lines += waterfall(medians, part, variant, state)
    lines += [f"note: {note}" for note in notes]
    figures = [{**asdict(row), "verdict": {state: row.verdict(state) for state in STATES}} for row in rows]
    for run in runs:
        run.get("modules") and run.pop("modules")  # type: ignore[attr-defined]
    return "\n".join(
        [*lines, json.dumps({**settings, "figures": figures, "notes": list(notes), "runs": list(runs)})]
    )
