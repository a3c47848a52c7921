"""A video's first frame, and the rest in pieces of equal length along time, with a state between them.

Where pieces are alike, the first frame is the end of a piece like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def by_pieces(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    size: int,
    rest_out: int,
    alike: bool,
    given: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Runs the first frame, then the rest in equal pieces; returns the joined result and the last state.

    Results are joined along time.

    Args:
        piece: maps a piece (B, n, ...), the state (None before the first frame) and, with ``alike``, whether
            it is the first one, to its result and state.
        x: a pytree of arrays (B, 1 + T, ...).
        size: most frames per piece (a multiple of four for video frames); less than one raises ValueError.
        rest_out: output frames of the T frames after the first.
        alike: whether the first frame is the end of a piece of the same length.
        given: int32 scalar: of how many frames, at least one, pieces are run; the result of others is zeros.
    """
    if size < 1:
        raise ValueError(f"a piece of {size} frames")
    T = jax.tree.leaves(x)[0].shape[1] - 1
    if T == 0:
        return piece(x, None)
    # As many pieces as the size requires, but of equal length: 20 frames by 16 are two pieces of 10.
    unit = max(1, T // rest_out)
    count = -(-T // size)
    size = -(-T // (count * unit)) * unit
    run = _run_alike if alike else _run_apart
    return run(piece, x, count, size, rest_out, given)


def _cut(leaf: jax.Array, count: int, size: int, before: int = 0) -> jax.Array:
    """Returns pieces (count, B, size, ...) of (B, T, ...), with ``before`` frames of zeros in front."""
    after = count * size - leaf.shape[1] - before
    leaf = jnp.pad(leaf, ((0, 0), (before, after), *((0, 0),) * (leaf.ndim - 2)))
    return jnp.moveaxis(leaf.reshape(len(leaf), count, size, *leaf.shape[2:]), 1, 0)


def _run_apart(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    count: int,
    size: int,
    rest_out: int,
    given: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Runs the first frame as one piece, and the rest as ``count`` pieces of ``size``; see ``by_pieces``."""
    y, state = piece(jax.tree.map(lambda leaf: leaf[:, :1], x), None)
    rest = jax.tree.map(lambda leaf: leaf[:, 1:], x)

    def step(state: Any, x: Any) -> tuple[Any, jax.Array]:
        y, state = piece(x, state)
        return state, y

    if count == 1 and given is None:
        outputs, state = piece(rest, state)
        return jnp.concatenate([y, outputs], 1), state
    pieces = jax.tree.map(lambda leaf: _cut(leaf, count, size), rest)
    steps = None if given is None else -((1 - given) // size)
    state, outputs = _scan(step, state, pieces, steps)
    return jnp.concatenate([y, outputs[:, :rest_out]], 1), state


def _run_alike(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    count: int,
    size: int,
    rest_out: int,
    given: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Runs all in pieces of ``size``, of which the first ends with the first frame; see ``by_pieces``."""
    pieces = jax.tree.map(lambda leaf: _cut(leaf, count + 1, size, size - 1), x)
    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    made = jax.eval_shape(lambda x: piece(x, None, jnp.bool_(True))[1], first)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made)

    def step(state: Any, x: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        y, state = piece(x[0], state, x[1])
        return state, y

    steps = None if given is None else 1 - (1 - given) // size
    state, outputs = _scan(step, state, (pieces, jnp.arange(count + 1) == 0), steps)
    before = outputs.shape[1] // (count + 1) - 1
    return outputs[:, before : before + 1 + rest_out], state


def _scan(
    step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, pieces: Any, steps: jax.Array | None
) -> tuple[Any, jax.Array]:
    """Runs ``lax.scan`` over the pieces, or the first ``steps`` of them; joins the results along time."""
    if steps is None:
        state, outputs = lax.scan(step, state, pieces)
    else:
        # A branch around the scan would make XLA copy the large state.
        state, outputs = _scan_some(step, state, pieces, steps)
    outputs = jnp.moveaxis(outputs, 0, 1)
    return state, outputs.reshape(len(outputs), -1, *outputs.shape[3:])


def _scan_some(
    step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, pieces: Any, steps: jax.Array
) -> tuple[Any, jax.Array]:
    """Runs ``lax.scan`` over the first ``steps`` pieces; the results of the others are zeros."""

    def at(index: jax.Array | int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], pieces)

    def body(index: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, outputs = carry
        state, y = step(state, at(index))
        return state, lax.dynamic_update_index_in_dim(outputs, y, index, 0)

    count = len(jax.tree.leaves(pieces)[0])
    y = jax.eval_shape(step, state, at(0))[1]
    return lax.fori_loop(0, steps, body, (state, jnp.zeros((count, *y.shape), y.dtype)))  # type: ignore[no-any-return]
