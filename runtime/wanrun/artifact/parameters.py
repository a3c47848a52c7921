"""The manifest's records of weights: the layout and the checksums of each parameter."""

from __future__ import annotations

__all__ = ["LAYERS", "nest"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wanrun.artifact.layout import EIGHT_BITS, ArrayLayout
from wanrun.artifact.record import Dtype, Record
from wanrun.files import plain_relative

Tree = dict[str, Any]
"""Nested dicts, as programs take weights."""

LAYERS = "layers"
"""The logical axis of the layers of stacked parameters, which is the first."""

if TYPE_CHECKING:
    EightBitForm = str
else:
    EightBitForm = Literal[tuple(EIGHT_BITS)]
    """A form of stored weights that have scales."""


class DtypePolicy(Record, frozen=True, omit_defaults=True):
    """Storage dtypes of one component.

    Attributes:
        weights: matmul and convolution weights with their biases.
        norms: norms; in the transformer also the condition embedder and scale_shift_table, in the image
            encoder also the class and position embeddings.
        eight_bit: the layers whose weights are of 8 bits instead, and in which form, by path: beside each
            ``weight`` (out, in) is ``scale``, float32 (out,), by which the layer multiplies its product; of
            ``q8_0`` float16 (out, in / 32), by which it multiplies blocks of the weight.
    """

    weights: Dtype
    norms: Dtype
    eight_bit: Mapping[str, EightBitForm] = msgspec.field(default_factory=dict)


class Parameter(Record, frozen=True, kw_only=True):
    """One array of a component.

    Attributes:
        layout: shape, dtype, rows and chunk files.
        axes: a logical axis such as ``heads``, or None, per dimension; shardings derive from them.
        crc32c: checksum of every row, 8 hexadecimal digits each.
        sha256: sha256 over the concatenated sha256 digests of the rows.
    """

    layout: ArrayLayout
    axes: tuple[str | None, ...]
    crc32c: tuple[str, ...]
    sha256: str

    def __post_init__(self) -> None:
        if len(self.crc32c) != self.layout.rows:
            raise ValueError(f"{len(self.crc32c)} checksums for {self.layout.rows} rows")
        if len(self.axes) != len(self.layout.shape):
            raise ValueError(f"axes {self.axes} for shape {self.layout.shape}")


class Component(Record, frozen=True):
    """One Orbax checkpoint: a model's parameters by path."""

    folder: str
    parameters: Mapping[str, Parameter]

    def __post_init__(self) -> None:
        plain_relative(self.folder, "a component")
        folders = set[str]()
        for path in self.parameters:
            plain_relative(path, "a parameter")
            folders |= {path[:end] for end, letter in enumerate(path) if letter == "/"}
        if both := sorted(folders & self.parameters.keys()):
            raise ValueError(f"{both[0]} is a parameter, and others are below it")

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(parameter.layout.nbytes for parameter in self.parameters.values())


def nest(flat: Mapping[str, Any]) -> Tree:
    """Builds nested dicts from paths joined with '/'."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def flat(tree: Tree) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path, the reverse of ``nest``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        below = flat(value) if isinstance(value, dict) else {"": value}
        leaves |= {f"{key}/{path}".removesuffix("/"): leaf for path, leaf in below.items()}
    return leaves
