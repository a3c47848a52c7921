"""What depends on one row of a prompt, computed for the rows that hold tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.prompt_rows import PIECE, PromptRows
from wanbuild.models.tracing import TraceOptions, tracing_with

ROWS, WIDTH = 4 * PIECE, 24


def embeddings(*lengths: int) -> jax.Array:
    """Prompts of these lengths, zero behind them."""
    values = np.random.default_rng(0).standard_normal((len(lengths), ROWS, WIDTH), np.float32)
    return jnp.asarray(np.where(np.arange(ROWS)[:, None] < np.reshape(lengths, (-1, 1, 1)), values, 0))


def function(rows: jax.Array) -> dict[str, jax.Array]:
    """Two functions of each row, of different dtypes and shapes; not zero for a row of zeros."""
    wide = jnp.tanh(rows + 0.5)
    return {"k": wide.astype(jnp.bfloat16), "v": wide.reshape(*rows.shape[:2], 3, -1) * 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        ((1, 70), [1, 2]),
        ((PIECE, 3), [1, 1]),
        ((ROWS, 0), [4, 0]),
        ((PIECE + 1,), [2]),
        ((0, 0), [0, 0]),
    ],
)
def test_all_rows_are_there(lengths: tuple[int, ...], pieces: list[int]) -> None:
    given = embeddings(*lengths)

    def program(given: jax.Array) -> tuple[Any, Any]:
        prompts = PromptRows.of(given)
        return prompts.map(function), prompts.pieces

    made, used = jax.jit(program)(given)
    assert used.tolist() == pieces
    expected = function(given)
    assert {name: (x.shape, x.dtype) for name, x in made.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    for name in made:
        np.testing.assert_array_equal(np.asarray(made[name]), np.asarray(expected[name]), strict=True)


def test_only_pieces_with_tokens_are_computed() -> None:
    """Rows behind them are taken from the last row, so other values there do not arrive."""
    rows = jnp.asarray(np.arange(ROWS, dtype=np.float32)[None, :, None])
    made = PromptRows(rows, jnp.array([2])).map(lambda rows: rows)
    expected = np.where(np.arange(ROWS) < 2 * PIECE, np.arange(ROWS), ROWS - 1)
    np.testing.assert_array_equal(np.asarray(made)[0, :, 0], expected)


def test_where_all_rows_are_computed() -> None:
    assert PromptRows.of(embeddings(3)[:, : PIECE - 1]).pieces is None
    with tracing_with(TraceOptions(cpu=False)):
        prompts = PromptRows.of(embeddings(3))
    assert prompts.pieces is None
    np.testing.assert_array_equal(prompts.map(lambda rows: rows + 1), embeddings(3) + 1)
