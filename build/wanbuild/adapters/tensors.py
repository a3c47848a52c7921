"""The tensors of an adapter, planned from what LoRA files change in one transformer, and made row by row.

A pair of matrices on a ``Linear`` goes into that layer's slot, in the artifact's order of rows and with the
layers of a stack together. A change of a bias, a norm or a table is kept as it is. Nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanbuild.components import kind_of
from wanbuild.conversion.tensor import finite
from wanbuild.lora.deltas import FullDelta, LowRankDelta
from wanbuild.lora.lora_file import shortly
from wanbuild.mapping.engine import Assignment, Fill, assign
from wanbuild.mapping.original import LISTED
from wanbuild.mapping.rules import TRANSFORMS, halves
from wanbuild.models.eight_bit import linear_layers
from wanbuild.source.shapes import Shapes, component_shapes
from wanrun import Manifest
from wanrun.artifact.adapter import LORA_A, LORA_B
from wanrun.errors import SourceError

Changes = Mapping[str, Sequence[LowRankDelta | FullDelta]]
"""The changes of one transformer, in order, by the name of the published tensor."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of an adapter, made while it is written: ``rows`` yields one layer of a stack at a time."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The parameters of one transformer.

    ``shapes`` are those of the published tensors that fill them, ``products`` the paths of ``Linear`` layers.
    """

    shapes: Shapes
    assignments: tuple[Assignment, ...]
    products: frozenset[str]


def layout_of(manifest: Manifest, expert: str) -> Layout:
    """Returns the layout of one of an artifact's transformers."""
    config = manifest.configs[expert]
    kind = kind_of(expert, config.get("_class_name"))
    module = kind.module(kind.parse(config, f"the config of {expert}"), kind.policy(None))
    shapes = component_shapes(expert, config)
    assignments, problems = assign(kind.rules, shapes, module, expert)
    assert not problems, problems  # the shapes follow from the same module
    return Layout(shapes, assignments, frozenset(linear_layers(module)))


def planned_tensors(
    expert: str, layout: Layout, changes: Changes, dtype: np.dtype[Any]
) -> list[PlannedTensor]:
    """Plans an adapter's tensors of one transformer; ``dtype`` is that of the low-rank matrices.

    Raises SourceError for a change that fits neither a slot nor a small parameter.
    """
    changed = [
        (item, rows)
        for item in layout.assignments
        if any(rows := [changes.get(fill.key, ()) for fill in item.fills])
    ]
    if misfits := [key for item, rows in changed for key in _misfits(item, rows, _taken(item, layout))]:
        several = len(misfits) > 1
        count = (
            f"{len(misfits)} changes are of whole matrices" if several else "1 change is of a whole matrix"
        )
        raise SourceError(
            "mismatch",
            f"{count}, and not of low rank: {shortly(misfits, LISTED)}",
            expected="pairs of matrices, and changes of biases, norms and tables",
            remedy="merge it at convert: wanbuild convert --lora FILE",
        )
    found = list[PlannedTensor]()
    for item, rows in changed:
        if _taken(item, layout) is LowRankDelta:
            found += _slot(expert, item, rows, dtype)
        else:
            found.append(_small(expert, item, rows, layout.shapes))
    return found


def _taken(item: Assignment, layout: Layout) -> type[Any]:
    """Returns the kind of change of a parameter that an adapter can hold; NoneType if it can hold none."""
    path, _, leaf = item.path.rpartition("/")
    if leaf != "weight" or len(item.shape) - item.stacked < 2:
        return FullDelta
    return LowRankDelta if path in layout.products else type(None)


def _misfits(
    item: Assignment, rows: Sequence[Sequence[LowRankDelta | FullDelta]], kind: type[Any]
) -> Iterator[str]:
    """Yields the names of a parameter's changes that are of another kind."""
    for fill, parts in zip(item.fills, rows, strict=True):
        for one in parts:
            if not isinstance(one, kind):
                yield one.key if isinstance(one, FullDelta) else fill.key


def _slot(
    expert: str, item: Assignment, rows: Sequence[Sequence[Any]], dtype: np.dtype[Any]
) -> Iterator[PlannedTensor]:
    """Yields the two matrices of a layer's slot, of the largest rank of its rows."""
    name = f"{expert}/{item.path.removesuffix('/weight')}"
    *layers, outputs, inputs = item.shape
    rank = max(sum(one.rank for one in parts) for parts in rows)

    def down() -> Iterator[np.ndarray]:
        for parts in rows:
            values = np.concatenate([*(one.down() for one in parts), np.zeros((rank, inputs))])[:rank]
            yield _cast(values, dtype, f"{name}/{LORA_A}")

    def up() -> Iterator[np.ndarray]:
        for fill, parts in zip(item.fills, rows, strict=True):
            values = np.concatenate([*(one.up() for one in parts), np.zeros((outputs, rank))], 1)[:, :rank]
            yield _in_order(_cast(values, dtype, f"{name}/{LORA_B}"), fill)

    yield PlannedTensor(f"{name}/{LORA_A}", (*layers, rank, inputs), dtype, down)
    yield PlannedTensor(f"{name}/{LORA_B}", (*layers, outputs, rank), dtype, up)


def _small(expert: str, item: Assignment, rows: Sequence[Sequence[Any]], shapes: Shapes) -> PlannedTensor:
    """Returns the change of a small parameter, the sum of all of them."""
    name, float32 = f"{expert}/{item.path}", np.dtype(np.float32)

    def changes() -> Iterator[np.ndarray]:
        for fill, parts in zip(item.fills, rows, strict=True):
            shape = shapes[fill.key]
            values = sum((one.values() for one in parts), np.zeros(math.prod(shape))).reshape(shape)
            yield _in_order(_cast(TRANSFORMS[fill.transform](values), float32, name), fill)

    return PlannedTensor(name, item.shape, float32, changes)


def _in_order(rows: np.ndarray, fill: Fill) -> np.ndarray:
    """Returns rows in the artifact's order."""
    return halves(rows, fill.head_dim) if fill.head_dim else rows


def _cast(values: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Returns values of a tensor in its dtype; raises SourceError if one overflows."""
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, order="C")
    if not finite(cast):
        raise SourceError(
            "not_finite",
            f"{name} has a value that is not finite in {dtype.name}",
            remedy="use smaller scales",
        )
    return cast
