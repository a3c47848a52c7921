"""A naive converter: applies a mapping table key by key, independently of the streaming one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wanbuild.mapping.rules import TRANSFORMS, Rule
from wanbuild.models.params import abstract_params, flatten, parameter_axes
from wanbuild.models.partition import ROTARY


def order_of_halves(rows: int, head_dim: int) -> list[int]:
    """The rows of rotated heads as an artifact has them: of each head the even ones, then the odd ones."""
    heads = range(0, rows, head_dim)
    return [head + row for head in heads for first in (0, 1) for row in range(first, head_dim, 2)]


def load_params(state_dict: Mapping[str, np.ndarray], rules: Sequence[Rule], module: Any) -> dict[str, Any]:
    """Fills the module's parameters from a checkpoint.

    Args:
        state_dict: every key of the checkpoint.
        rules: the mapping table of the component.
        module: the abstract module.

    Returns:
        Nested dicts of arrays with the structure, shapes and dtypes of ``abstract_params(module)``.

    Raises:
        AssertionError: listing every key that no rule or several rules match, every target that does not
            exist or has another shape, and every parameter or layer row that is filled twice or not at all.
    """
    abstract = dict(flatten(abstract_params(module)))
    axes = parameter_axes(module)
    arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in abstract.items()}
    filled: dict[str, list[int | None]] = {path: [] for path in abstract}
    problems = []
    for key, value in state_dict.items():
        matches = [(rule, match) for rule in rules if (match := re.fullmatch(rule.pattern, key))]
        if len(matches) != 1:
            problems.append(f"{key} matches {len(matches)} rules")
            continue
        rule, match = matches[0]
        if rule.target is None:
            continue
        groups = match.groupdict()
        row = int(groups.pop("layer")) if "layer" in groups else None
        path = rule.target.format(**groups)
        if path not in arrays:
            problems.append(f"{key} goes to {path}, which does not exist")
            continue
        if row is not None and row >= len(arrays[path]):
            problems.append(f"{key} goes to row {row} of {path}, which has {len(arrays[path])}")
            continue
        target = arrays[path] if row is None else arrays[path][row]
        new = TRANSFORMS[rule.transform](np.asarray(value))
        if ROTARY in axes[path]:
            new = new[order_of_halves(len(new), module.config.attention_head_dim)]
        if new.shape != target.shape:
            problems.append(f"{key} has shape {new.shape}, {path} has {target.shape}")
            continue
        target[...] = new
        filled[path].append(row)
    for path, rows in filled.items():
        expected = [None] if rows[:1] == [None] else list(range(len(arrays[path])))
        if sorted(rows, key=str) != sorted(expected, key=str):
            problems.append(f"{path} is filled {len(rows)} times")
    assert not problems, "\n".join(problems)
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree
