"""Products of bfloat16 operands, as they are and widened to float32 first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.layers import Linear
from wanbuild.models.loops import scan, to_bits
from wanbuild.models.params import bind, scan_layers, stacked
from wanbuild.models.products import BLOCK_ROWS, FEW_ROWS
from wanbuild.models.tracing import TraceOptions, tracing_with

LAYERS, ROWS, IN, OUT = 3, 24, 320, 208


def run(widened: bool, weights: Any, x: Any) -> Any:
    """A loop over stacked layers that are passed as bits; returns the compiled function and its results."""
    layer = Linear(IN, OUT, jnp.bfloat16, (None, None))

    def function(weights: Any, x: jax.Array) -> jax.Array:
        def step(carry: None, one: Any) -> tuple[None, jax.Array]:
            return carry, bind(layer, one)(x, jnp.float32)

        return scan(step, None, weights)[1]

    with tracing_with(TraceOptions(widened=widened)):
        lowered = jax.jit(function).lower(weights, x)
    return lowered, lowered.compile()(weights, x)


@pytest.fixture
def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    weights = {
        "weight": jnp.asarray(rng.standard_normal((LAYERS, OUT, IN)), jnp.bfloat16),
        "bias": jnp.asarray(rng.standard_normal((LAYERS, OUT)), jnp.bfloat16),
    }
    return jax.tree.map(to_bits, weights), jnp.asarray(rng.standard_normal((ROWS, IN)), jnp.bfloat16)


@pytest.mark.slow
def test_a_widened_product_is_the_same(arguments: tuple[Any, Any]) -> None:
    _, native = run(False, *arguments)
    _, widened = run(True, *arguments)
    assert float(jnp.max(jnp.abs(native - widened))) <= 2e-6 * float(jnp.max(jnp.abs(native)))


@pytest.mark.slow
def test_one_layer_is_widened_at_a_time(arguments: tuple[Any, Any]) -> None:
    native, widened = (run(wide, *arguments)[0] for wide in (False, True))
    assert "optimization_barrier" in widened.as_text() and "optimization_barrier" not in native.as_text()
    more = (
        widened.compile().memory_analysis().temp_size_in_bytes
        - native.compile().memory_analysis().temp_size_in_bytes
    )
    assert more <= 4 * (OUT * IN + ROWS * IN + ROWS * OUT)  # and not all three layers


def test_float32_stays_as_it_is() -> None:
    layer = Linear(IN, OUT, jnp.float32, (None, None), bias=False)
    shapes = {"weight": jax.ShapeDtypeStruct((OUT, IN), jnp.float32)}
    with tracing_with(TraceOptions(widened=True)):
        text = jax.jit(lambda w, x: bind(layer, w)(x)).lower(shapes, jnp.ones((ROWS, IN))).as_text()
    assert "barrier" not in text and "convert" not in text


def stacked_layer(rows: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any, np.ndarray]:
    """A loop over stacked layers of three blocks each, its arguments, and the exact result."""
    layer = stacked(Linear(IN, 3 * BLOCK_ROWS, dtype, (None, None)), LAYERS)
    rng = np.random.default_rng(rows)
    weights = {
        "weight": jnp.asarray(rng.standard_normal((LAYERS, 3 * BLOCK_ROWS, IN)), dtype),
        "bias": jnp.asarray(rng.standard_normal((LAYERS, 3 * BLOCK_ROWS)), dtype),
    }
    x = jnp.asarray(rng.standard_normal((2, FEW_ROWS, IN)), dtype)[:, : rows // 2]

    def function(weights: Any, x: jax.Array) -> jax.Array:
        out = jnp.zeros((2, rows // 2, 3 * BLOCK_ROWS), jnp.float32)
        return scan_layers(bind(layer, weights), lambda one, out, _: out + one(x, jnp.float32), out)

    weight, bias = (np.asarray(weights[name], np.float64) for name in ("weight", "bias"))
    exact = sum(np.asarray(x, np.float64) @ weight[i].T + bias[i] for i in range(LAYERS))
    return jax.jit(function).lower(jax.tree.map(to_bits, weights), x), (weights, x), exact


@pytest.mark.thorough
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("rows", [6, FEW_ROWS, FEW_ROWS + 2])
def test_a_weight_is_sliced_by_block_for_few_rows(rows: int, widened: bool) -> None:
    with tracing_with(TraceOptions(widened=widened)):
        lowered, (weights, x), exact = stacked_layer(rows)
    found = lowered.compile()(jax.tree.map(to_bits, weights), x)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    whole, block = (f"tensor<1x{size}x{IN}xui16>" for size in (3 * BLOCK_ROWS, BLOCK_ROWS))
    text = lowered.as_text()
    assert (block in text, whole in text) == (rows <= FEW_ROWS, rows > FEW_ROWS)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others() -> None:
    """Bitwise, so that an embedding is that of its prompt alone."""
    lowered, (weights, x), _ = stacked_layer(64)
    several = lowered.compile()(jax.tree.map(to_bits, weights), x)
    other, _, _ = stacked_layer(64)
    changed = other.compile()(jax.tree.map(to_bits, weights), x.at[1].set(x[1] * 3 - 1))
    np.testing.assert_array_equal(np.asarray(several[0]), np.asarray(changed[0]))
    assert float(jnp.max(jnp.abs(several[1] - changed[1]))) > 1


@pytest.mark.slow
def test_float32_is_sliced_by_block_too() -> None:
    lowered, (weights, x), exact = stacked_layer(8, jnp.float32)
    found = lowered.compile()(weights, x)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=2e-6 * np.abs(exact).max())


@pytest.mark.slow
def test_a_rounded_product() -> None:
    """It is rounded once, with its bias; XLA sees a product whose result is bfloat16."""
    rng = np.random.default_rng(5)
    weights = {"weight": rng.standard_normal((48, 64)), "bias": rng.standard_normal(48)}
    params = {name: jnp.asarray(values, jnp.bfloat16) for name, values in weights.items()}
    layer = bind(Linear(64, 48, jnp.bfloat16, (None, None)), params)
    x = jnp.asarray(rng.standard_normal((7, 64)), jnp.bfloat16)
    exact = layer(x, out_dtype=jnp.float32)
    with tracing_with(TraceOptions(cpu=False, rounded=True)):
        found = layer(x, out_dtype=jnp.float32)
        text = str(jax.make_jaxpr(layer)(x))
    assert found.dtype == jnp.float32 and "preferred_element_type=bfloat16" in text
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, rtol=2**-7, atol=2**-5)
