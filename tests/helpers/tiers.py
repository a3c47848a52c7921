"""Which tests ``make test-fast`` and ``make test`` leave out, and what each tier takes.

Marks at the tests choose: ``slow`` at one of 0.25 CPU seconds or more, all of its cases and the fixtures of
its file together, or with an artifact that few others share; ``thorough`` at one of two seconds or more.
Tests with torch, those in tests/parity, are slow without a mark.

tests/times.tsv has the CPU seconds of each folder's tests on a quiet machine, by the first tier that runs
them. ``python tests/helpers/tiers.py RECORDS`` replaces the folders that ``--record-times`` has recorded,
each as a whole, and names the tests that need another mark.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

TIMES = Path(__file__).parents[1] / "times.tsv"
TIERS = ("fast", "test", "all")

LIMITS: Mapping[str, float] = {"fast": 0.25, "test": 2.0}
"""CPU seconds from which on a test belongs to the next tier."""

BUDGETS: Mapping[str, float] = {"fast": 80.0, "test": 760.0, "all": 2300.0}
"""CPU seconds of the tests of each tier, with the fixtures that they share. Two cores have 120 in a minute;
lint, types, imports and collection come on top."""

Times = dict[str, dict[str, float]]
"""CPU seconds by folder, then by tier."""

Record = Mapping[str, Any]
"""What ``helpers.cost`` writes of a case: its test, tier, seconds, fixtures, and what is shared by name."""


def tier(item: pytest.Item) -> str:
    """The first tier that has a test: ``fast``, ``test`` or ``all``."""
    if item.get_closest_marker("thorough"):
        return "all"
    return "test" if item.get_closest_marker("slow") or item.nodeid.startswith("tests/parity/") else "fast"


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks as ``slow`` whatever ``make test-fast`` leaves out."""
    for item in items:
        if tier(item) != "fast":
            item.add_marker("slow")


def thorough_but(first: int, rows: Sequence[Any]) -> list[Any]:
    """Rows of a parametrize, of which only the first ones are not ``thorough``."""
    return [*rows[:first], *(pytest.param(*row, marks=pytest.mark.thorough) for row in rows[first:])]


def read_times() -> Times:
    rows = (line.split("\t") for line in TIMES.read_text().splitlines()[1:])
    return {folder: dict(zip(TIERS, map(float, seconds), strict=True)) for folder, *seconds in rows}


def write_times(times: Times) -> None:
    rows = [(name, *(f"{of.get(tier, 0.0):.1f}" for tier in TIERS)) for name, of in sorted(times.items())]
    TIMES.write_text("".join("\t".join(row) + "\n" for row in [("folder", *TIERS), *rows]))


def folder(name: str) -> str:
    """Where a test or a shared fixture is, of its id."""
    place = name.partition("::")[0]
    return str(PurePosixPath(place).parent) if place.endswith(".py") else place


def updated(times: Times, records: Iterable[Record]) -> Times:
    """Takes what was recorded in place of what was known of the same folders.

    One machine is busier than another, by a factor of two: what is recorded is divided by the median of
    recorded to known seconds, over the folders of a second or more that are in both.
    """
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    kept = list(records)
    recorded = {folder(record["test"]) for record in kept}
    for name, of, seconds in _spent(kept):
        if folder(name) in recorded:
            found[folder(name)][of] += seconds
    known = {name: sum(times[name].values()) for name in found if name in times}
    ratios = [sum(found[name].values()) / seconds for name, seconds in known.items() if seconds >= 1]
    slower = statistics.median(ratios) if len(ratios) >= 10 else 1.0
    new = {name: {of: s / slower for of, s in spent.items()} for name, spent in found.items()}
    return times | new


def _spent(records: list[Record]) -> Iterator[tuple[str, str, float]]:
    """Tests and shared fixtures, each with the first tier that needs it."""
    first: dict[str, str] = {}
    for record in records:
        yield record["test"], record["tier"], record["seconds"]
        for name in record["fixtures"]:
            first[name] = min(str(record["tier"]), first.get(name, "all"), key=TIERS.index)
    for record in records:
        for name, seconds in record["shared"].items():
            if name.partition("::")[0] and "::" in name:  # neither an import nor a fixture of pytest
                yield name, first.get(name, str(record["tier"])), seconds


def misplaced(records: Iterable[Record]) -> Iterator[str]:
    """Tests that take twice what their tier allows."""
    functions: defaultdict[tuple[str, str], float] = defaultdict(float)
    for record in records:
        name = record["test"].partition("[")[0]
        functions[name, record["tier"]] += record["seconds"]
        own = [key for key in record["shared"] if key.startswith(name.partition("::")[0] + "::")]
        functions[name, record["tier"]] += sum(record["shared"][key] for key in own)
    for (name, of), seconds in sorted(functions.items()):
        if seconds > 2 * LIMITS.get(of, seconds):
            yield f"{name} takes {seconds:.1f} s, too long for {of}"


if __name__ == "__main__":
    lines = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    write_times({name: of for name, of in updated(read_times(), lines).items() if Path(name).is_dir()})
    print(*misplaced(lines), sep="\n")
