"""The rows of prompts, most of which are padding: models were trained with 512 rows for 30 tokens too.

Axes: P prompts, T rows of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.loops import from_bits, map_leading, to_bits
from wanbuild.models.tracing import for_one_cpu

PIECE = 64
"""Rows that are computed at once."""


@dataclass(frozen=True)
class PromptRows:
    """Rows (P, T, D); those behind each prompt are all alike, as are all rows of a prompt that no step uses.

    Rows are embeddings, or results computed from them row by row. A program for a CPU computes row-wise
    results for the ``pieces``, int32 (P,), of each prompt that hold tokens, and for one row of padding: keys
    and values of a 1.3B model take 0.45 s for 64 tokens, 1.1 s for 512 rows. Any other has None for them and
    computes all rows, because a loop of unknown length costs an accelerator more.
    """

    rows: jax.Array
    pieces: jax.Array | None = None

    @staticmethod
    def of(embeddings: jax.Array) -> PromptRows:
        """Returns the rows of embeddings, which are zero behind each prompt."""
        T = embeddings.shape[1]
        if not for_one_cpu() or T % PIECE:
            return PromptRows(embeddings)
        tokens = jnp.any(embeddings != 0, axis=2)
        last = jnp.max(jnp.where(tokens, jnp.arange(1, T + 1), 0), axis=1)
        return PromptRows(embeddings, (last + PIECE - 1) // PIECE)

    def map(self, function: Callable[[jax.Array], Any]) -> Any:
        """Returns a function's result for all rows.

        The function takes any number of rows, (P, R, D), and returns a pytree of arrays (P, R, ...), in which
        a row depends only on the same row.
        """
        if self.pieces is None:
            return function(self.rows)
        found = map_leading(lambda prompt: _mapped(function, *prompt), (self.rows, self.pieces))
        return jax.tree.map(lambda x: x[:, 0], found)


def _mapped(function: Callable[[jax.Array], Any], rows: jax.Array, pieces: jax.Array) -> Any:
    """Returns a function's result for the rows (T, D) of one prompt."""
    bits = to_bits(rows)[None]
    T = len(rows)

    def computed(start: jax.Array, size: int) -> Any:
        some = from_bits(jax.lax.dynamic_slice_in_dim(bits, start, size, axis=1))
        return jax.tree.map(to_bits, function(some))

    def piece(index: jax.Array, out: Any) -> Any:
        start = index * PIECE
        return jax.tree.map(
            lambda all_rows, some: jax.lax.dynamic_update_slice_in_dim(all_rows, some, start, axis=1),
            out,
            computed(start, PIECE),
        )

    padding = computed(jnp.int32(T - 1), 1)
    out = jax.tree.map(lambda row: jnp.broadcast_to(row, (1, T, *row.shape[2:])), padding)
    return jax.tree.map(from_bits, jax.lax.fori_loop(0, pieces, piece, out))
