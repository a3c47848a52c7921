"""Products in 8 bits, against NumPy: the rounding of each token, and sums that are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.loops import LayerSlice, to_bits
from wanbuild.models.products import product
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanrun import EIGHT_BITS

TOKENS, IN, OUT = 7, 96, 48
ROWS = [one.dtype for one in EIGHT_BITS.values() if not one.block]


def expected(x: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(EIGHT_BITS[dtype].largest)
    rows = x / np.where(scale > 0, scale, 1)
    stored = np.rint(rows) if EIGHT_BITS[dtype].whole else rows.astype(jnp.dtype(dtype)).astype(np.float64)
    return stored.astype(np.float64) @ weight.astype(np.float64).T * scale


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("dtype", ROWS)
def test_against_numpy(dtype: str, cpu: bool) -> None:
    """Tokens of zeros, with an outlier, and of tiny and of large values, beside ordinary ones."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, TOKENS, IN)).astype(np.float32)
    x[0, 0], x[0, 2], x[1, 3] = 0, 1e-30 * x[0, 2], 1e30 * x[1, 3]
    x[0, 1, 5] = 1000
    weight = (40 * rng.standard_normal((3, OUT, IN))).clip(-127, 127).astype(jnp.dtype(dtype))
    with tracing_with(TraceOptions(cpu=cpu, w8a8=True)):
        stack = to_bits(jnp.asarray(weight))
        found = jax.jit(lambda x, stack, layer: product(x, LayerSlice(stack, layer, dtype)))(x, stack, 1)
    assert found.dtype == jnp.float32 and np.isfinite(found).all() and not np.any(found[0, 0])
    exact = expected(x, weight[1], dtype)
    size = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-35)
    np.testing.assert_allclose(found / size, exact / size, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ROWS)
def test_what_is_not_finite_stays_so(dtype: str, wrong: float) -> None:
    """In its own token alone: a NaN must not become a number that looks right."""
    x = np.ones((3, IN), np.float32)
    x[1, 4], x[2] = wrong, 1e-37
    with tracing_with(TraceOptions(w8a8=True)):
        found = np.asarray(jax.jit(product)(x, jnp.ones((OUT, IN), dtype)))
    assert np.isfinite(found[[0, 2]]).all() and not np.isfinite(found[1]).any()
    np.testing.assert_allclose(found[0], IN, rtol=1e-6)


@pytest.mark.parametrize("dtype", ROWS)
def test_nothing_is_widened(dtype: str) -> None:
    """Both operands of the product are of 8 bits, whatever x is; a weight of bfloat16 is as it was."""
    with tracing_with(TraceOptions(cpu=False, w8a8=True)):
        for kind, operands in ((dtype, dtype), ("bfloat16", "bfloat16")):
            shapes = [jax.ShapeDtypeStruct((4, IN), jnp.bfloat16), jax.ShapeDtypeStruct((OUT, IN), kind)]
            jaxpr = jax.make_jaxpr(product)(*shapes)
            (dot,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
            assert {variable.aval.dtype.name for variable in dot.invars} == {operands}
