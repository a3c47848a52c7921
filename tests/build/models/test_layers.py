"""Products of bfloat16 operands, as they are and widened to float32 first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.layers import Linear, widened_products
from wanbuild.models.loops import scan, to_bits
from wanbuild.models.params import bind

LAYERS, ROWS, IN, OUT = 3, 24, 320, 208


def run(widened: bool, weights: Any, x: Any) -> Any:
    """A loop over stacked layers that are passed as bits; returns the compiled function and its results."""
    layer = Linear(IN, OUT, jnp.bfloat16, (None, None))

    def function(weights: Any, x: jax.Array) -> jax.Array:
        def step(carry: None, one: Any) -> tuple[None, jax.Array]:
            return carry, bind(layer, one)(x, jnp.float32)

        return scan(step, None, weights)[1]

    with widened_products(widened):
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


def test_a_widened_product_is_the_same(arguments: tuple[Any, Any]) -> None:
    _, native = run(False, *arguments)
    _, widened = run(True, *arguments)
    assert float(jnp.max(jnp.abs(native - widened))) <= 2e-6 * float(jnp.max(jnp.abs(native)))


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
    with widened_products(True):
        text = jax.jit(lambda w, x: bind(layer, w)(x)).lower(shapes, jnp.ones((ROWS, IN))).as_text()
    assert "barrier" not in text and "convert" not in text
