"""Declares parameters, and turns a Flax NNX module into a pure function of a plain dict of arrays.

A module declares each parameter once with ``param``: shape, dtype and logical axes. Everything else (mapping
targets, the checkpoint's layout, abstract program arguments, shardings) derives from that record, so a module
is built abstractly and never holds an array.

Layer stacking: ``stacked(block, n)`` gives every parameter of one block a leading axis ``layers``, and
``scan_layers`` applies the block with ``jax.lax.scan`` over that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanbuild.models.loops import LayerSlice, from_bits, scan, to_bits
from wanbuild.models.partition import constrain_parameter, mesh_sizes
from wanbuild.models.tracing import for_one_cpu
from wanrun.artifact.parameters import LAYERS

VOCAB = "vocab"

SLICED_AXES = (LAYERS, VOCAB)
"""Parameters whose first axis is one of these are read slice by slice: see ``models.loops``."""

Tree = dict[str, Any]
"""Nested dicts with string keys, which ``jax.export`` can serialize, unlike ``nnx.State`` or int keys."""


def param(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """Declares one parameter, with its dtype in storage and as a program argument.

    ``axes`` has one logical axis name (or None) per dimension, for sharding; another number of them raises
    ValueError.
    """
    if len(shape) != len(axes):
        raise ValueError(f"{len(shape)} dimensions, but axes {axes}")
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, declared=jnp.dtype(dtype))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _sliced(variable: nnx.Variable, stack: jax.Array, layer: jax.Array | int) -> nnx.Variable:
    """Returns a parameter as one layer of a stack, sliced where it is read."""
    return variable.replace(LayerSlice(stack, layer, variable.get_metadata()["declared"]))


def _floats(variable: nnx.Variable, value: jax.Array) -> nnx.Variable:
    """Returns a parameter with a value, in which integers become floats of the declared dtype."""
    return variable.replace(from_bits(value, variable.get_metadata()["declared"]))


def stacked(block: Any, num_layers: int) -> Any:
    """Returns the abstract block with a leading layer axis of size num_layers on every parameter."""
    graphdef, state = nnx.split(block)

    def add_axis(variable: nnx.Variable) -> nnx.Variable:
        return param(
            (num_layers, *variable.shape), variable.dtype, (LAYERS, *variable.get_metadata()["axes"])
        )

    return nnx.merge(graphdef, jax.tree.map(add_axis, state, is_leaf=_is_variable))


class Stack:
    """The layers of a module made by ``stacked``, which holds arrays; read one at a time in a loop.

    A program for a CPU has each layer's parameters as ``LayerSlice``, any other as arrays.
    """

    def __init__(self, blocks: nnx.Module) -> None:
        self._graphdef, state = nnx.split(blocks)
        self._state = jax.tree.map(lambda x: to_bits(jnp.asarray(x)), state)
        self._where_read = for_one_cpu()

    def __len__(self) -> int:
        """The number of layers."""
        return len(jax.tree.leaves(self._state)[0])

    @property
    def scanned(self) -> Any:
        """The arrays that ``scan`` slices to read one layer after the other with ``layer``."""
        return np.arange(len(self)) if self._where_read else self._state

    def layer(self, scanned: Any, whole: bool = True) -> Any:
        """Returns the layer of one slice of ``scanned``.

        If ``whole``, parameters that a mesh stores in parts are made whole.
        """
        return self.at(scanned) if self._where_read else self._merged(scanned, whole)

    def at(self, index: jax.Array) -> Any:
        """Returns the layer of an index, an int32 scalar."""
        if self._where_read:
            layer = jax.tree.map(
                lambda one: _sliced(one, one.get_value(), index), self._state, is_leaf=_is_variable
            )
            return nnx.merge(self._graphdef, layer)
        return self._merged(
            jax.tree.map(
                lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), self._state
            )
        )

    def _merged(self, layer: Any, whole: bool = True) -> Any:
        """Returns a layer of these arrays; on a mesh, parameters that are stored in parts are made whole."""

        def made_whole(variable: nnx.Variable) -> nnx.Variable:
            axes = variable.get_metadata()["axes"][1:]
            return variable.replace(constrain_parameter(variable.get_value(), axes))

        layer = jax.tree.map(lambda one: _floats(one, one.get_value()), layer, is_leaf=_is_variable)
        if whole and mesh_sizes():
            layer = jax.tree.map(made_whole, layer, is_leaf=_is_variable)
        return nnx.merge(self._graphdef, layer)


def scan_layers(blocks: nnx.Module, apply: Callable[..., Any], carry: Any, per_layer: Any = None) -> Any:
    """Runs ``carry = apply(block, carry, per_layer[i])`` over the stacked layers with ``lax.scan``.

    ``blocks`` is made by ``stacked`` and holds arrays. ``per_layer`` is a pytree of arrays with a leading
    layer axis, or None.
    """
    stack = Stack(blocks)

    def body(carry: Any, scanned: Any) -> tuple[Any, None]:
        layer, extra = scanned
        return apply(stack.layer(layer), carry, extra), None

    return scan(body, carry, (stack.scanned, per_layer))[0]


def scan_beside(
    blocks: nnx.Module,
    side: nnx.Module,
    positions: Sequence[int],
    apply: Callable[..., Any],
    apply_side: Callable[..., Any],
    carry: Any,
    per_layer: Any = None,
    per_side: Any = None,
) -> Any:
    """Runs ``scan_layers`` with a second, shorter stack, whose layers follow some layers of the first.

    Args:
        blocks: the main stack; every step of the scan applies one of its layers.
        side: the other stack.
        positions: indices of the main layers that the side's layers follow, ascending, one for each.
        apply: takes a block, the carry and that layer's slice of per_layer; returns the new carry.
        apply_side: the same for a layer of side and per_side.
    """
    stack, side_stack = Stack(blocks), Stack(side)
    side_bits = jax.tree.map(lambda x: to_bits(jnp.asarray(x)), per_side)
    follows = np.full(len(stack), -1, np.int32)
    follows[list(positions)] = np.arange(len(positions))

    def body(carry: Any, scanned: Any) -> tuple[Any, None]:
        layer, extra, index = scanned
        carry = apply(stack.layer(layer), carry, extra)

        def beside(carry: Any) -> Any:
            extra = jax.tree.map(lambda bits: from_bits(bits[index]), side_bits)
            return apply_side(side_stack.at(index), carry, extra)

        return jax.lax.cond(index >= 0, beside, lambda carry: carry, carry), None

    return scan(body, carry, (stack.scanned, per_layer, follows))[0]


def _stringify(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _stringify(value) for key, value in node.items()}
    return node


def abstract_params(module: nnx.Module) -> Tree:
    """Returns a module's parameters as nested dicts of ``jax.ShapeDtypeStruct``; indices become strings."""
    return _stringify(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) in sorted order; a path joins the keys with '/'."""
    for key in sorted(tree):
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(tree[key], Mapping):
            yield from flatten(tree[key], path)
        else:
            yield path, tree[key]


def parameter_axes(module: nnx.Module) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical axes of every parameter by path."""
    state = nnx.state(module, nnx.Param)
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)[0]
    return {"/".join(map(_key, path)): variable.get_metadata()["axes"] for path, variable in leaves}


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", entry))


def _at(params: Any, path: tuple[Any, ...]) -> Any:
    """Returns the array at a path of nested dicts; KeyError if it is missing."""
    for entry in path:
        params = params[_key(entry)]
    return params


def bind(module: nnx.Module, params: Mapping[str, Any], without: Collection[str] = ()) -> Any:
    """Returns the module with these arrays in place of its abstract parameters.

    ``params`` are nested dicts with the structure of ``abstract_params(module)``; a missing one raises
    KeyError. Unsigned integers stand for floats of the same bits: see ``from_bits``. The parts named in
    ``without`` stay abstract, and are not used.
    """
    graphdef, state = nnx.split(module)

    def fill(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        if _key(path[0]) in without:
            return variable
        node = _at(params, path)
        sliced = variable.get_metadata()["axes"][0] in SLICED_AXES
        return variable.replace(node) if sliced else _floats(variable, node)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state, is_leaf=_is_variable))


def bind_layer(blocks: nnx.Module, params: Mapping[str, Any]) -> Any:
    """Returns one layer of an abstract module made by ``stacked``, with these arrays as its parameters.

    ``params`` are nested dicts of arrays, without the layer axis; see ``bind``.
    """
    graphdef, state = nnx.split(blocks)

    def fill(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        node = _at(params, path)
        # Layers of a stack are read the same way: see ``Stack``.
        return _sliced(variable, node[None], 0) if for_one_cpu() else _floats(variable, node)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state, is_leaf=_is_variable))
