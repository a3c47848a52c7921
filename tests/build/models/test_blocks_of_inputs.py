"""Weights with a scale for each block of inputs: the bits of the same weights in float32 or bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.layers import Linear
from wanbuild.models.loops import LayerSlice, to_bits
from wanbuild.models.params import bind, bind_layer, scan_layers, stacked
from wanbuild.models.products import FEW_ROWS, in_blocks, product
from wanbuild.models.tracing import TraceOptions, tracing_with

pytestmark = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    "form", [TraceOptions(), TraceOptions(widened=True), TraceOptions(cpu=False, rounded=True)]
)
@pytest.mark.parametrize("tokens", [7, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(dtype: str, tokens: int, form: TraceOptions) -> None:
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


class Up(nnx.Module):
    """A block with one layer."""

    def __init__(self) -> None:
        self.up = Linear(96, 96, jnp.float32, ("embed", "mlp"))


@pytest.mark.parametrize("form", [TraceOptions(), TraceOptions(cpu=False)])
def test_layers_of_a_stack(form: TraceOptions) -> None:
    """In a loop, and streamed one by one: what weights of the same values in float32 give."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((5, 96)), jnp.float32)
    arrays = {
        "weight": rng.integers(-128, 128, (3, 96, 96)).astype(np.int8),
        "scale": (0.001 * rng.standard_normal((3, 96, 3))).astype(np.float16),
        "bias": rng.standard_normal((3, 96)).astype(np.float32),
    }
    values = arrays["weight"] * np.repeat(arrays["scale"], 32, axis=-1).astype(np.float32)
    plain, kept = stacked(Up(), 3), store_in_eight_bits(stacked(Up(), 3), {"up": "q8_0"})

    def looped(module: Any, params: Any) -> jax.Array:
        return scan_layers(bind(module, {"up": params}), lambda block, x, _: block.up(x), x)  # type: ignore[no-any-return]

    def streamed(params: Any) -> jax.Array:
        return bind_layer(kept, {"up": params}).up(x)  # type: ignore[no-any-return]

    with tracing_with(form):
        expected = jax.jit(lambda: looped(plain, {"weight": values, "bias": arrays["bias"]}))()
        np.testing.assert_array_equal(jax.jit(lambda: looped(kept, arrays))(), expected)
        first = jax.jit(lambda: streamed({name: array[0] for name, array in arrays.items()}))()
    np.testing.assert_allclose(first, np.asarray(x) @ values[0].T + arrays["bias"][0], atol=1e-5)
