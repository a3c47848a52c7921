"""Runs parts of gpu.py, one after the other, and prints what came of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_bench import Bench, NotGivenError
from gpu_parts import Part
from gpu_rows import reason

Outcomes = dict[str, Any]


def run_parts(
    parts: Mapping[str, Part],
    bench: Bench,
    names: Sequence[str],
    deadline: float,
    missing: Sequence[str],
    outcomes: Outcomes | None = None,
    keep: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> Outcomes:
    """Runs parts until the time is up, and returns what came of each: state, note, seconds, rows.

    Args:
        parts: all parts.
        bench: runs their processes.
        names: those to run, in order.
        deadline: when all must end, on time.monotonic().
        missing: packages that are not here.
        outcomes: of the parts that have run; those of these are added.
        keep: is called after each part that has run to its end, with its name and its outcome.
    """
    outcomes = {} if outcomes is None else outcomes
    try:
        for name in names:
            why = _obstacle(parts[name], bench, deadline - time.monotonic(), missing, outcomes)
            if why:
                outcomes[name] = _left_out(why)
            else:
                outcomes[name] = {"state": "interrupted", "note": "", "seconds": None, "rows": []}
                until = deadline if bench.smoke else min(deadline, time.monotonic() + parts[name].limit)
                _measure(bench, name, parts[name], until, outcomes[name])
                if keep is not None and outcomes[name]["state"] != "left out":
                    keep(name, outcomes[name])
            print(f"{name}: {outcomes[name]['state']} {outcomes[name]['note']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was measured follows", file=sys.stderr)
    for name in names:
        outcomes.setdefault(name, _left_out("the run was interrupted"))
    return outcomes


def _obstacle(part: Part, bench: Bench, left: float, missing: Sequence[str], outcomes: Outcomes) -> str:
    """Why a part cannot begin; empty if it can."""
    lacking = [package for package in part.needs if package in missing]
    if "jax" in part.needs and outcomes.get("device", {}).get("state") in ("failed", "left out"):
        lacking.append("a GPU that JAX can use")
    lacking += [f"part {name}" for name in part.after if outcomes.get(name, {}).get("state") != "done"]
    if lacking:
        return f"missing: {', '.join(lacking)}"
    if bench.smoke:
        return ""
    memory = device_row(outcomes).get("value")
    if memory is not None and memory < part.memory:
        return f"it takes {part.memory:.0f} GB of the device's memory, and JAX has {memory:.0f}"
    if left < part.least:
        return f"{max(left, 0):.0f} s were left, it takes {part.least:.0f} or more"
    return ""


def device_row(outcomes: Outcomes) -> Mapping[str, Any]:
    """Returns the row of the device that JAX sees; an empty one if there is none."""
    rows = outcomes.get("device", {}).get("rows", ())
    return next((row for row in rows if row["what"] == "device" and not row["failed"]), {})


def _left_out(why: str) -> dict[str, Any]:
    return {"state": "left out", "note": why, "seconds": None, "rows": []}


def _measure(bench: Bench, name: str, part: Part, until: float, outcome: dict[str, Any]) -> None:
    """Runs one part and puts its rows and its state into the outcome, whatever happens."""
    started = time.monotonic()
    bench.begin(name, until)
    try:
        part.run(bench)
    except NotGivenError as error:
        outcome |= _left_out(str(error))
        return
    except Exception as error:
        bench.rows.fail(name, reason(error))
    finally:
        outcome["rows"], outcome["seconds"] = bench.rows.read(), round(time.monotonic() - started, 1)
        for row in outcome["rows"]:
            print("  " + "  ".join(filter(None, _cells(row, None))), file=sys.stderr, flush=True)
    failed = sum(row["failed"] for row in outcome["rows"])
    outcome["state"] = "failed" if failed or not outcome["rows"] else "done"
    outcome["note"] = f"{failed} of {len(outcome['rows'])} rows failed" if failed else ""


def _cells(row: Mapping[str, Any], ceiling: float | None) -> tuple[str, ...]:
    """Returns a row's cells: what, value, TFLOP/s, of ceiling, note."""
    size = row["value"]
    value = "" if size is None else f"{size:{'.3f' if size >= 0.01 else '.3g'}} {row['unit']}"
    tflops = row.get("tflops")
    share = f"{tflops / ceiling:.0%}" if tflops and ceiling else ""
    note = f"FAILED: {row['note']}" if row["failed"] else row["note"]
    return row["what"], value, f"{tflops:.3g}" if tflops else "", share, note


def table(outcomes: Mapping[str, Any]) -> str:
    """Returns the table of all parts; operations are compared with the fastest matrix product."""
    rows = [row for outcome in outcomes.values() for row in outcome["rows"]]
    ceiling = max((row["tflops"] for row in rows if row.get("ceiling")), default=None)
    cells = [("part", "what", "value", "TFLOP/s", "of ceiling", "note")]
    for name, outcome in outcomes.items():
        took = "" if outcome["seconds"] is None else f"{outcome['seconds']:.1f} s"
        cells.append((name, outcome["state"], took, "", "", outcome["note"]))
        cells += [("", *_cells(row, ceiling)) for row in outcome["rows"]]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    aligned = ("<", "<", ">", ">", ">")
    return "\n".join(
        "  ".join(
            [*(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths, strict=False)), row[5]]
        ).rstrip()
        for row in cells
    )
