"""Weights with a scale for each block of inputs: the bits of the same weights in float32 or bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.blocks_of_inputs import in_blocks
from wanbuild.models.forms import Forms, tracing_with
from wanbuild.models.loops import LayerSlice, to_bits
from wanbuild.models.products import FEW_ROWS, product


@pytest.mark.parametrize("form", [Forms(), Forms(widened=True), Forms(cpu=False, rounded=True)])
@pytest.mark.parametrize("tokens", [7, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(dtype: str, tokens: int, form: Forms) -> None:
    """Of a layer that is sliced where it is read, as a CPU has them, and of an array."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((tokens, 96)), dtype)
    weight = rng.integers(-128, 128, (3, 48, 96)).astype(np.int8)
    scale = (0.01 * rng.standard_normal((3, 48, 3))).astype(np.float16)
    values = weight.reshape(3, 48, 3, 32).astype(np.float32) * scale[..., None].astype(np.float32)
    plain = jnp.asarray(values.reshape(weight.shape), dtype)

    def stored(slice_of: Any) -> jax.Array:
        return product(x, in_blocks(slice_of(weight), slice_of(scale)))

    def sliced(stack: Any) -> LayerSlice:
        return LayerSlice(to_bits(jnp.asarray(stack)), 1, stack.dtype)

    with tracing_with(form):
        expected = jax.jit(lambda: product(x, sliced(plain)))()
        np.testing.assert_array_equal(jax.jit(lambda: stored(sliced))(), expected)
        expected = jax.jit(lambda: product(x, plain[1]))()
        np.testing.assert_array_equal(
            jax.jit(lambda: stored(lambda stack: jnp.asarray(stack[1])))(), expected
        )
