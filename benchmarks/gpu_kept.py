"""The figures of gpu.py that are kept: for each chip a file of JSON in the folder ``gpu``.

Of each part a file has ``measured`` (date, versions, seconds that it took, tolerance, and figures by name)
and ``failed`` (date, versions, and the reasons by name), or one of them. A figure has ``value`` and ``unit``,
and may have ``tflops``, ``note`` and a ``tolerance`` of its own. The less a value is, the better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts import Part

FOLDER = Path(__file__).parent / "gpu"
CONCERNED: Mapping[str, Sequence[str]] = {"jax": ("jax", "cuda", "cudnn"), "torch": ("torch",)}
"""By a package that a part needs: the versions on which its figures depend, besides the driver's."""
Kept = dict[str, Any]


def read_kept(folder: Path, chip: str, device: str) -> Kept:
    """Returns what is kept of a chip; of one that is new nothing but its name and JAX's name of it."""
    path = folder / f"{chip}.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"chip": chip, "device": device, "parts": {}}


def write_kept(folder: Path, kept: Kept) -> None:
    """Writes the file of a chip, a figure a line; a process that is ended leaves the old one."""
    text = json.dumps(kept, indent=1)
    innermost = re.compile(r"\{[^{}]*\}")
    folder.mkdir(parents=True, exist_ok=True)
    lines = innermost.sub(lambda found: re.sub(r"\n\s*", " ", found[0]), text)
    path = folder / f"{kept['chip']}.json"
    path.with_suffix(".new").write_text(lines + "\n")
    path.with_suffix(".new").replace(path)


def versions_of(part: Part, found: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the versions here on which a part's figures depend."""
    names = ["driver", *(name for package in part.needs for name in CONCERNED.get(package, ()))]
    return {name: found[name] for name in names if name in found}


def _alike(kept: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether the versions that both know are the same; 9.19 is 9.19.0."""
    pairs = [(kept[name] + ".", here[name] + ".") for name in kept.keys() & here.keys()]
    return all(one.startswith(other) or other.startswith(one) for one, other in pairs)


def pending(parts: Mapping[str, Part], kept: Kept, here: Mapping[str, str]) -> list[str]:
    """Returns the parts that have no figures of these versions, in order; those that failed are the last."""
    new, again = list[str](), list[str]()
    for name, part in parts.items():
        versions = versions_of(part, here)
        states = kept["parts"].get(name, {})
        known = {state for state, one in states.items() if _alike(one["versions"], versions)}
        if "failed" in known:
            again.append(name)
        elif "measured" not in known:
            new.append(name)
    return [*new, *again]


def with_before(parts: Mapping[str, Part], names: Sequence[str]) -> list[str]:
    """Returns the parts with those before each whose artifacts it takes."""
    found: list[str] = []
    for name in names:
        found += [one for one in (*parts[name].after, name) if one not in found]
    return found


def put(
    kept: Kept, name: str, part: Part, outcome: Mapping[str, Any], here: Mapping[str, str], date: str
) -> None:
    """Puts what came of a part into what is kept; figures stay until there are others.

    Args:
        kept: of the chip; it is changed.
        name: the part's name.
        part: the part.
        outcome: its rows and seconds, as ``run_parts`` returns them.
        here: the versions here.
        date: the day, YYYY-MM-DD.
    """
    states, versions = kept["parts"].setdefault(name, {}), versions_of(part, here)
    figures = {row["what"]: _figure(row) for row in outcome["rows"] if not row["failed"]}
    failed = {row["what"]: row["note"] for row in outcome["rows"] if row["failed"]}
    states.pop("failed", None)
    if any("value" in figure for figure in figures.values()):
        old = states.get("measured", {"versions": {}, "figures": {}})
        if versions == old["versions"]:
            figures = {**old["figures"], **figures}
        states["measured"] = {
            "date": date,
            "versions": versions,
            "seconds": outcome["seconds"],
            "tolerance": part.tolerance,
            "figures": figures,
        }
    if failed:
        states["failed"] = {"date": date, "versions": versions, "reasons": failed}


def _figure(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what is empty, and with four digits."""
    kept = {name: row.get(name) for name in ("value", "unit", "tflops", "tolerance", "note")}
    return {
        name: float(f"{one:.4g}") if isinstance(one, float) else one
        for name, one in kept.items()
        if one not in (None, "")
    }


def beyond(name: str, kept: Kept, outcome: Mapping[str, Any]) -> list[str]:
    """Returns a line for each kept figure of a part that is exceeded by more than its tolerance, or gone."""
    measured, lines = kept["parts"][name]["measured"], list[str]()
    rows = {row["what"]: row for row in outcome["rows"]}
    for what, figure in measured["figures"].items():
        row = rows.get(what, {"value": None, "note": "not measured", "failed": "value" in figure})
        if row["failed"] or "value" not in figure:
            lines += [f"{name}: {what}: {row['note']}"] if row["failed"] else []
            continue
        old, tolerance = figure["value"], figure.get("tolerance", measured["tolerance"])
        if row["value"] is None:
            lines.append(f"{name}: {what}: no value; kept {old} {figure['unit']}")
        elif row["value"] > old * (1 + tolerance):
            excess = f"more than {tolerance:.0%} above the kept {old} of {measured['date']}"
            lines.append(f"{name}: {what}: {row['value']:.4g} {figure['unit']}, {excess}")
    return lines
