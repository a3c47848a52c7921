"""Applies a mapping table to a checkpoint's keys; each key is used once, or one error lists all problems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanbuild.mapping.rules import TRANSFORMS, Rule
from wanbuild.models.params import LAYERS, abstract_params, flatten, parameter_axes
from wanbuild.models.partition import ROTARY

LISTED = 20
"""Problems named in full in one message; the others are counted."""


@dataclass(frozen=True)
class Fill:
    """A source tensor that becomes one row of a parameter, or the whole parameter.

    ``transform`` is a name in ``TRANSFORMS``. ``head_dim`` is the rows of each head, whose pairs become
    halves (``ROTARY``); 0 for all other parameters.
    """

    key: str
    transform: str
    head_dim: int = 0


@dataclass(frozen=True)
class Assignment:
    """A parameter and the sources of its rows: one fill per layer if it is stacked, else one.

    ``dtype`` is its stored dtype, and ``axes`` has a logical axis or None for each dimension. ``form`` is the
    form of 8-bit weights, one of ``EIGHT_BITS``; empty for any other parameter.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[str | None, ...]
    fills: tuple[Fill, ...]
    form: str = ""

    @property
    def stacked(self) -> bool:
        """Whether axis 0 is the layer axis."""
        return self.axes[0] == LAYERS


def _transformed_shape(shape: tuple[int, ...], transform: str) -> tuple[int, ...] | None:
    """Returns the shape after a transform; None if the transform does not fit the rank."""
    try:
        # A zero-stride view has the shape without the memory.
        return TRANSFORMS[transform](np.broadcast_to(np.float32(0), shape)).shape
    except ValueError:
        return None


def _matches(rules: Sequence[Rule], key: str) -> list[tuple[str | None, int | None, str]]:
    """Returns (path, layer, transform) of every rule that matches a key; path is None for an ignored key."""
    found = []
    for rule in rules:
        if match := re.fullmatch(rule.pattern, key, re.ASCII):
            groups = match.groupdict()
            layer = groups.pop("layer", None)
            path = None if rule.target is None else rule.target.format(**groups)
            found.append((path, None if layer is None else int(layer), rule.transform))
    return found


def assign(
    rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]], module: Any, component: str
) -> tuple[tuple[Assignment, ...], list[str]]:
    """Finds the source of every row of every parameter.

    ``shapes`` has the shape of every source tensor, by key, and ``module`` is the abstract module whose
    parameters are to be filled. Returns the assignments, sorted by path, and the problems: keys that match no
    rule or several, rows filled twice or not at all, and wrong shapes. If there are problems, the assignments
    are incomplete.
    """
    targets = dict(flatten(abstract_params(module)))
    axes = parameter_axes(module)
    problems: list[str] = []
    rows: dict[str, dict[int | None, Fill]] = {path: {} for path in targets}

    for key in sorted(shapes):
        matches = _matches(rules, key)
        if len(matches) != 1:
            reason = "is not a part of this model" if not matches else f"matches {len(matches)} rules"
            problems.append(f"{component}: unexpected key {key} {reason}")
            continue
        path, layer, transform = matches[0]
        if path is None:
            continue
        target = targets.get(path)
        stacked = target is not None and axes[path][0] == LAYERS
        if target is None or stacked != (layer is not None):
            problems.append(f"{component}: unexpected key {key}, this model has no parameter {path}")
            continue
        if stacked and layer is not None and layer >= target.shape[0]:
            problems.append(f"{component}: unexpected key {key}, the config says {target.shape[0]} layers")
            continue
        if layer in rows[path]:
            problems.append(f"{component}: {key} and {rows[path][layer].key} both fill {path}")
            continue
        head_dim = module.config.attention_head_dim if ROTARY in axes[path] else 0
        rows[path][layer] = Fill(key, transform, head_dim)
        expected = tuple(target.shape[1:] if stacked else target.shape)
        found = _transformed_shape(shapes[key], transform)
        if found != expected:
            problems.append(
                f"{component}: {key} has shape {list(shapes[key])}, {path} needs {list(expected)}"
            )

    assignments = []
    for path, target in sorted(targets.items()):
        stacked = axes[path][0] == LAYERS
        wanted: list[int | None] = list(range(target.shape[0])) if stacked else [None]
        missing = [row for row in wanted if row not in rows[path]]
        if missing:
            where = "" if not stacked else f", layers {_ranges([row for row in missing if row is not None])}"
            problems.append(f"{component}: missing key for {path}{where}")
            continue
        fills = tuple(rows[path][row] for row in wanted)
        dtype = np.dtype(target.dtype)
        assignments.append(Assignment(path, tuple(target.shape), dtype, axes[path], fills))
    return tuple(assignments), problems


def _ranges(rows: Sequence[int]) -> str:
    """Returns ascending integers as text: '0-2, 5'."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def describe_problems(problems: Sequence[str]) -> str:
    """Returns the problems in one line."""
    more = f" and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return "; ".join(problems[:LISTED]) + more
