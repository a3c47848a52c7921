"""Products of layers: bfloat16, widened, by block, in 8 bits with scales, and for the rows of a prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.layers import Linear
from wanbuild.models.loops import LayerSlice, scan, to_bits
from wanbuild.models.params import bind, bind_layer, scan_layers, stacked
from wanbuild.models.products import BLOCK_ROWS, FEW_ROWS, in_blocks, product
from wanbuild.models.prompt_rows import PIECE, PromptRows
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanrun import EIGHT_BITS

TOKENS, IN, OUT = 7, 96, 48
DTYPES = [one.dtype for one in EIGHT_BITS.values() if not one.block]


def expected(x: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(EIGHT_BITS[dtype].largest)
    rows = x / np.where(scale > 0, scale, 1)
    stored = np.rint(rows) if EIGHT_BITS[dtype].whole else rows.astype(jnp.dtype(dtype)).astype(np.float64)
    return stored.astype(np.float64) @ weight.astype(np.float64).T * scale


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: str, wrong: float) -> None:
    """In its own token alone: a NaN must not become a number that looks right."""
    x = np.ones((3, IN), np.float32)
    x[1, 4], x[2] = wrong, 1e-37
    with tracing_with(TraceOptions(w8a8=True)):
        found = np.asarray(jax.jit(product)(x, jnp.ones((OUT, IN), dtype)))
    assert np.isfinite(found[[0, 2]]).all() and not np.isfinite(found[1]).any()
    np.testing.assert_allclose(found[0], IN, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_widened(dtype: str) -> None:
    """Both operands of the product are of 8 bits, whatever x is; a weight of bfloat16 is as it was."""
    with tracing_with(TraceOptions(cpu=False, w8a8=True)):
        for kind, operands in ((dtype, dtype), ("bfloat16", "bfloat16")):
            shapes = [jax.ShapeDtypeStruct((4, IN), jnp.bfloat16), jax.ShapeDtypeStruct((OUT, IN), kind)]
            jaxpr = jax.make_jaxpr(product)(*shapes)
            (dot,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
            assert {variable.aval.dtype.name for variable in dot.invars} == {operands}


# Products of bfloat16 operands, as they are and widened to float32 first.


LAYERS, ROWS, INPUTS, OUTPUTS = 3, 24, 320, 208


def run(widened: bool, weights: Any, x: Any) -> Any:
    """A loop over stacked layers that are passed as bits; returns the compiled function and its results."""
    layer = Linear(INPUTS, OUTPUTS, jnp.bfloat16, (None, None))

    def function(weights: Any, x: jax.Array) -> jax.Array:
        def step(carry: None, one: Any) -> tuple[None, jax.Array]:
            return carry, bind(layer, one)(x, jnp.float32)

        return scan(step, None, weights)[1]

    with tracing_with(TraceOptions(widened=widened)):
        lowered = jax.jit(function).lower(weights, x)
    return lowered, lowered.compile()(weights, x)


@pytest.mark.slow
def test_a_widened_product_is_the_same_and_one_layer_is_widened_at_a_time() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "weight": jnp.asarray(rng.standard_normal((LAYERS, OUTPUTS, INPUTS)), jnp.bfloat16),
        "bias": jnp.asarray(rng.standard_normal((LAYERS, OUTPUTS)), jnp.bfloat16),
    }
    x = jnp.asarray(rng.standard_normal((ROWS, INPUTS)), jnp.bfloat16)
    found = [run(widened, jax.tree.map(to_bits, weights), x) for widened in (False, True)]
    native, widened = (result for _, result in found)
    assert float(jnp.max(jnp.abs(native - widened))) <= 2e-6 * float(jnp.max(jnp.abs(native)))
    assert ["optimization_barrier" in lowered.as_text() for lowered, _ in found] == [False, True]
    sizes = [lowered.compile().memory_analysis().temp_size_in_bytes for lowered, _ in found]
    # And not all three layers.
    assert sizes[1] - sizes[0] <= 4 * (OUTPUTS * INPUTS + ROWS * INPUTS + ROWS * OUTPUTS)


def test_float32_stays_as_it_is() -> None:
    layer = Linear(INPUTS, OUTPUTS, jnp.float32, (None, None), bias=False)
    shapes = {"weight": jax.ShapeDtypeStruct((OUTPUTS, INPUTS), jnp.float32)}
    with tracing_with(TraceOptions(widened=True)):
        text = jax.jit(lambda w, x: bind(layer, w)(x)).lower(shapes, jnp.ones((ROWS, INPUTS))).as_text()
    assert "barrier" not in text and "convert" not in text


def stacked_layer(rows: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any, np.ndarray]:
    """A loop over stacked layers of three blocks each, its arguments, and the exact result."""
    layer = stacked(Linear(INPUTS, 3 * BLOCK_ROWS, dtype, (None, None)), LAYERS)
    rng = np.random.default_rng(rows)
    weights = {
        "weight": jnp.asarray(rng.standard_normal((LAYERS, 3 * BLOCK_ROWS, INPUTS)), dtype),
        "bias": jnp.asarray(rng.standard_normal((LAYERS, 3 * BLOCK_ROWS)), dtype),
    }
    x = jnp.asarray(rng.standard_normal((2, FEW_ROWS, INPUTS)), dtype)[:, : rows // 2]

    def function(weights: Any, x: jax.Array) -> jax.Array:
        out = jnp.zeros((2, rows // 2, 3 * BLOCK_ROWS), jnp.float32)
        return scan_layers(bind(layer, weights), lambda one, out, _: out + one(x, jnp.float32), out)

    weight, bias = (np.asarray(weights[name], np.float64) for name in ("weight", "bias"))
    exact = sum(np.asarray(x, np.float64) @ weight[i].T + bias[i] for i in range(LAYERS))
    return jax.jit(function).lower(jax.tree.map(to_bits, weights), x), (weights, x), exact


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "dtype", "widened"),
    [
        (8, "float32", False),
        *((rows, "bfloat16", wide) for rows in (6, FEW_ROWS, FEW_ROWS + 2) for wide in (False, True)),
    ],
)
def test_a_weight_is_sliced_by_block_for_few_rows(rows: int, dtype: str, widened: bool) -> None:
    with tracing_with(TraceOptions(widened=widened)):
        lowered, (weights, x), exact = stacked_layer(rows, jnp.dtype(dtype))
    found = lowered.compile()(jax.tree.map(to_bits, weights) if dtype == "bfloat16" else weights, x)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    if dtype == "float32":
        return
    whole, block = (f"tensor<1x{size}x{INPUTS}xui16>" for size in (3 * BLOCK_ROWS, BLOCK_ROWS))
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


# Weights with a scale for each block of inputs: the bits of the same weights in float32 or bfloat16.


@pytest.mark.thorough
@pytest.mark.parametrize(
    "form", [TraceOptions(), TraceOptions(widened=True), TraceOptions(cpu=False, rounded=True)]
)
@pytest.mark.parametrize("tokens", [7, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_scales_of_blocks(dtype: str, tokens: int, form: TraceOptions) -> None:
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


@pytest.mark.slow
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


# What depends on one row of a prompt, computed for the rows that hold tokens.


TEXT_ROWS, WIDTH = 4 * PIECE, 24


def embeddings(*lengths: int) -> jax.Array:
    """Prompts of these lengths, zero behind them."""
    values = np.random.default_rng(0).standard_normal((len(lengths), TEXT_ROWS, WIDTH), np.float32)
    return jnp.asarray(np.where(np.arange(TEXT_ROWS)[:, None] < np.reshape(lengths, (-1, 1, 1)), values, 0))


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
        ((TEXT_ROWS, 0), [4, 0]),
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
    rows = jnp.asarray(np.arange(TEXT_ROWS, dtype=np.float32)[None, :, None])
    made = PromptRows(rows, jnp.array([2])).map(lambda rows: rows)
    expected = np.where(np.arange(TEXT_ROWS) < 2 * PIECE, np.arange(TEXT_ROWS), TEXT_ROWS - 1)
    np.testing.assert_array_equal(np.asarray(made)[0, :, 0], expected)


def test_where_all_rows_are_computed() -> None:
    assert PromptRows.of(embeddings(3)[:, : PIECE - 1]).pieces is None
    with tracing_with(TraceOptions(cpu=False)):
        prompts = PromptRows.of(embeddings(3))
    assert prompts.pieces is None
    np.testing.assert_array_equal(prompts.map(lambda rows: rows + 1), embeddings(3) + 1)
