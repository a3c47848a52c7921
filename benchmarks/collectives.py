"""Counts the bytes that one device sends in a compiled program, from its HLO."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
}
_HEADER = re.compile(r"^(?:ENTRY )?%(\S+) .*\{$")
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass
class _Computation:
    """What one computation of the module sends itself, and which others it runs how often."""

    sent: Counter[str] = field(default_factory=Counter)
    runs: list[tuple[str, int]] = field(default_factory=list)


def sent_bytes(hlo: str, turns: int | None = None) -> Counter[str]:
    """Returns the bytes that one device sends, by kind of collective.

    In a group of n, a device sends (n - 1) / n of an all-gather's result or an all-to-all's argument, twice
    that of an all-reduce, and all of a permutation. Both branches of a conditional count.

    Args:
        hlo: the compiled module as text, partitioned: shapes are those of one device.
        turns: how often a loop runs whose number of trips is an input, as that of a step's passes; None if
            there is none.

    Raises:
        ValueError: for a loop without a known number of trips that sends anything.
    """
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[1], _Computation())
            entry = header[1] if line.startswith("ENTRY") else entry
        elif " = " in line:
            _read(line, current)
    return _total(entry, computations, turns)


def _read(line: str, computation: _Computation) -> None:
    """Reads one instruction."""
    if found := _COLLECTIVE.search(line):
        arrays = [
            math.prod(int(size) for size in shape.split(",") if size) * _ITEM_BYTES[dtype]
            for dtype, shape in _ARRAY.findall(found[1])
        ]
        kind, nbytes = found[2], sum(arrays)
        n = 1 if kind == "collective-permute" else _group(line)
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
        computation.sent[kind] += int(nbytes * factor.get(kind, (n - 1) / n))
    if " while(" in line:
        trips = _TRIPS.search(line)
        body = re.search(r"body=%([^\s,]+)", line)
        assert body is not None
        computation.runs.append((body[1], int(trips[1]) if trips else -1))
        return
    for names in re.findall(
        r"(?:branch_computations=\{|(?:true|false)_computation=|to_apply=)([^}\s]*)", line
    ):
        computation.runs += [(name.strip(" %,"), 1) for name in names.split(",") if name.strip(" %,")]


def _group(line: str) -> int:
    """Returns the number of devices in a collective's groups."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    found = re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line)
    if found is None:
        raise ValueError(f"no replica groups in {line.strip()[:200]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2]))


def _total(name: str, computations: dict[str, _Computation], turns: int | None) -> Counter[str]:
    computation = computations.get(name, _Computation())
    total = Counter(computation.sent)
    for other, times in computation.runs:
        sent = _total(other, computations, turns)
        if sent and times < 0:
            if turns is None:
                raise ValueError(f"{other} runs an unknown number of times")
            times = turns
        total += Counter({kind: nbytes * times for kind, nbytes in sent.items()})
    return total
