"""The pages' tables of GPUs, made of the figures that gpu.py has kept: ``gpu.py --table`` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from gpu_bench import ROOT
from gpu_kept import FOLDER, Kept
from gpu_parts import PARTS

BEGIN = "<!-- chips: benchmarks/gpu.py --table writes this table -->\n"
END = "<!-- end of chips -->\n"
COLUMNS: Mapping[str, tuple[str, str]] = {
    "1.3B, a step with guidance at 832x480x81": ("step-1.3b", "step 1.3b 832x480x81"),
    "14B": ("step-14b", "step 14b 832x480x81"),
    "products of 8-bit floats": ("w8a8", "step 14b 832x480x81 float8 in 8 bits"),
    "14B at 1280x720x81": ("step-14b-720p", "step 14b 1280x720x81"),
    "VAE decode at 832x480x81": ("decode", "decode 832x480x81, TF32 products"),
    "1.3B ready after the process starts": ("start", "1.3b until ready, second"),
}
"""The head of a column, and the part and the figure that are in it."""


def all_kept(folder: Path = FOLDER) -> list[Kept]:
    """Returns what is kept of every chip, by its name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _measured(kept: Kept, part: str) -> dict[str, Any]:
    return kept["parts"].get(part, {}).get("measured", {"figures": {}})


def _day(text: str) -> str:
    day = date.fromisoformat(text)
    return f"{day.day} {day:%B %Y}"


def _lines(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(heads), *map(list, rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in cells)
        .replace("| --- |", "|---|")
        .replace(" --- |", "---|")
    )


def chips(found: Iterable[Kept]) -> str:
    """Returns the main figures, a line for each chip."""

    def row(kept: Kept) -> Iterable[str]:
        yield kept["device"]
        dates, versions = set[str](), set[str]()
        for part, what in COLUMNS.values():
            measured = _measured(kept, part)
            figure = measured["figures"].get(what, {})
            yield f"{figure['value']:.3g} {figure['unit']}" if "value" in figure else ""
            if "value" in figure:
                dates.add(measured["date"])
                versions.add(f"jax {measured['versions']['jax']}")
        yield ", ".join([*map(_day, sorted(dates)[-1:]), *sorted(versions)])

    return _lines(["GPU", *COLUMNS, "last measured"], map(row, found))


def parts(found: Iterable[Kept]) -> str:
    """Returns the parts that have been measured, a column for each chip."""
    found = list(found)
    rows = (
        [f"`{name}`", part.what, *(_state(kept["parts"].get(name, {})) for kept in found)]
        for name, part in PARTS.items()
        if name != "device"
    )
    return _lines(["part", "what it measures", *(kept["chip"] for kept in found)], rows)


def _state(states: Mapping[str, Any]) -> str:
    """When a part was measured, and why not all of it."""
    cells = [_day(states["measured"]["date"])] if "measured" in states else []
    reasons = states.get("failed", {}).get("reasons", {})
    cells += [f"{what}: {why}".replace("|", "\\|") for what, why in reasons.items()]
    return "; ".join(cells) or "not yet"


PAGES: Mapping[Path, Callable[[Iterable[Kept]], str]] = {
    ROOT / "README.md": chips,
    ROOT / "docs" / "targets.md": parts,
}
"""Each page that has a table, and what makes it."""


def with_table(page: Path) -> str:
    """Returns the text of a page with its table made anew.

    Raises:
        LookupError: if the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LookupError(f"{page} has no place for a table: {BEGIN.strip()}")
    return before + begin + PAGES[page](all_kept()) + end + after


def write_tables() -> None:
    """Writes the tables into their pages."""
    for page in PAGES:
        page.write_text(with_table(page), encoding="utf-8")
