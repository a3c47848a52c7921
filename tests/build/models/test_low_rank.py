"""Slots beside weights of every form, against float64; slots of zeros change no bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wanbuild.models.eight_bit import linear_layers, store_in_eight_bits
from wanbuild.models.layers import Linear
from wanbuild.models.loops import to_bits
from wanbuild.models.low_rank import declare_slots
from wanbuild.models.params import abstract_params, bind, parameter_axes, scan_layers, stacked
from wanbuild.models.products import BLOCK_ROWS, FEW_ROWS
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanrun import EIGHT_BITS
from wanrun.artifact.parameters import flat, nest

LAYERS, IN, OUT, RANK = 2, 96, 2 * BLOCK_ROWS, 8
FORMS = {
    "cpu": TraceOptions(),
    "widened": TraceOptions(widened=True),
    "w8a8": TraceOptions(w8a8=True),
    "chip": TraceOptions(cpu=False),
    "rounded": TraceOptions(cpu=False, rounded=True),
}
ERRORS = {"float32": 2e-6, "bfloat16": 6e-3}
CASES = [
    (stored, dtype, form, rows)
    for stored, dtype, form, rows in itertools.product(
        (None, "int8", "float8_e4m3fn", "q8_0"), ERRORS, FORMS, (5, FEW_ROWS + 1)
    )
    # XLA's CPU backend has no other product of bfloat16 than that of its own forms, which read few rows
    # block by block.
    if (FORMS[form].cpu or (dtype == "float32" and rows > FEW_ROWS))
    and not (form == "w8a8" and stored in (None, "q8_0"))
    # Other 8-bit weights than int8 are read otherwise, and multiplied alike.
    and (stored in (None, "int8") or (form in ("cpu", "w8a8") and dtype == "float32" and rows == 5))
    # Many rows are multiplied alike by both of these.
    and not (form == "widened" and dtype == "bfloat16" and rows > FEW_ROWS)
]


class Layers(nnx.Module):
    """Stacked layers."""

    def __init__(self, dtype: str, stored: str | None, rank: int) -> None:
        self.layers = stacked(Linear(IN, OUT, jnp.dtype(dtype), ("heads", "embed")), LAYERS)
        declare_slots(store_in_eight_bits(self, {} if stored is None else {"layers": stored}), rank, dtype)


def parameters(module: nnx.Module, seed: int) -> dict[str, Any]:
    """Random values of every parameter, by path; 8-bit ones over their whole range."""
    rng, found = np.random.default_rng(seed), dict[str, Any]()
    for path, leaf in flat(abstract_params(module)).items():
        values = rng.standard_normal(leaf.shape)
        if leaf.dtype.name in {one.dtype for one in EIGHT_BITS.values()}:
            values = (40 * values).clip(-127, 127)
        elif path.endswith("scale"):
            values = 0.001 + 0.01 * np.abs(values)
        found[path] = np.asarray(values).astype(leaf.dtype)
    return found


class Run:
    """Gives each layer's product, in the dtype of the sums; compiled once."""

    def __init__(self, dtype: str, stored: str | None, form: str, rank: int) -> None:
        self._form, self._dropped = FORMS[form], ("lora_a", "lora_b") if not rank else ("none",)
        self._forward = jax.jit(functools.partial(forward, Layers(dtype, stored, rank)))

    def __call__(self, params: Any, x: Any) -> np.ndarray:
        kept = {path: jnp.asarray(one) for path, one in params.items() if not path.endswith(self._dropped)}
        with tracing_with(self._form):
            return np.asarray(self._forward(jax.tree.map(to_bits, nest(kept)), jnp.asarray(x)))


def forward(module: Layers, params: Any, x: jax.Array) -> jax.Array:
    def apply(layer: Linear, carry: tuple[Any, Any], index: jax.Array) -> tuple[Any, Any]:
        x, out = carry
        return x, out.at[index].set(layer(x, jnp.float32))

    start = x, jnp.zeros((LAYERS, len(x), OUT), jnp.float32)
    return scan_layers(bind(module, params).layers, apply, start, jnp.arange(LAYERS))[1]


def exact(params: dict[str, Any], stored: str | None, x: np.ndarray, slots: bool) -> np.ndarray:
    wide = {path: np.asarray(one).astype(np.float64) for path, one in params.items()}
    weight = wide["layers/weight"]
    if stored is not None:
        scale = wide["layers/scale"].reshape(LAYERS, OUT, -1)
        weight = weight * np.repeat(scale, IN // scale.shape[-1], axis=-1)
    change = wide["layers/lora_b"] @ wide["layers/lora_a"]
    weight = weight + (change if slots else 0)
    return np.asarray(x.astype(np.float64) @ weight.swapaxes(1, 2) + wide["layers/bias"][:, None])


@pytest.mark.thorough
@pytest.mark.parametrize(("stored", "dtype", "form", "rows"), CASES)
def test_against_float64(stored: str | None, dtype: str, form: str, rows: int) -> None:
    """And zeros: what a program without slots computes, to the bit."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, IN)).astype(jnp.dtype(dtype))
    params, how = parameters(Layers(dtype, stored, RANK), 2), (dtype, stored, form)
    with_slots, without = Run(*how, RANK), Run(*how, 0)
    found = with_slots(params, x)
    wanted = exact(params, stored, x, slots=True)
    if FORMS[form].w8a8:  # the base is that of rounded activations; the change is not rounded
        plain = without(params, x)
        wanted = plain + wanted - exact(params, stored, x, slots=False)
    assert np.abs(found - wanted).max() <= ERRORS[dtype] * np.abs(wanted).max()

    zeros = {path: 0 * one if "lora" in path else one for path, one in params.items()}
    np.testing.assert_array_equal(with_slots(zeros, x).view(np.uint32), without(zeros, x).view(np.uint32))


@pytest.mark.parametrize(("stored", "own"), [(None, ("bfloat16", "bfloat16")), ("int8", ("int8", "int32"))])
def test_a_gpu_rounds_products_with_slots_as_others(stored: str | None, own: tuple[str, str]) -> None:
    """So cuBLAS writes half the bytes; activations are not rounded to 8 bits for them."""
    layer = store_in_eight_bits(
        Linear(IN, OUT, jnp.bfloat16, (None, None)), {} if stored is None else {"": stored}
    )
    declare_slots(layer, RANK, jnp.bfloat16)
    with tracing_with(TraceOptions(cpu=False, rounded=True, w8a8=True)):
        x = jax.ShapeDtypeStruct((4, IN), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(lambda params, x: bind(layer, params)(x))(abstract_params(layer), x)
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    kinds = [(eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name) for eqn in dots]
    assert kinds == [own, ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cpu", "widened"])
def test_small_changes_are_kept_that_a_merge_into_bfloat16_loses(form: str) -> None:
    """Changes of a thousandth of the weights, beside float64's merge; merged, most is rounded away."""
    x = np.random.default_rng(7).standard_normal((FEW_ROWS + 1, IN)).astype(jnp.bfloat16)
    params, how = parameters(Layers("bfloat16", None, RANK), 2), ("bfloat16", None, form)
    params["layers/lora_b"] = (params["layers/lora_b"].astype(np.float32) / 3000).astype(jnp.bfloat16)
    wide = {path: np.asarray(one).astype(np.float64) for path, one in params.items()}
    merged = wide["layers/weight"] + wide["layers/lora_b"] @ wide["layers/lora_a"]
    wanted = exact(params, None, x, slots=True)
    moved = np.linalg.norm(wanted - exact(params, None, x, slots=False))
    of_merged = Run(*how, 0)({**params, "layers/weight": merged.astype(jnp.bfloat16)}, x)
    errors = [np.linalg.norm(Run(*how, RANK)(params, x) - wanted), np.linalg.norm(of_merged - wanted)]
    assert errors[0] < 0.01 * moved < 0.5 * moved < errors[1]


def test_every_layer_of_a_transformer_has_slots() -> None:
    config = TransformerConfig(2, 32, 96, 3, 32, freq_dim=64)
    plain, module = WanTransformer(config), declare_slots(WanTransformer(config), RANK, jnp.bfloat16)
    params, axes = flat(abstract_params(module)), parameter_axes(module)
    added = params.keys() - flat(abstract_params(plain)).keys()
    assert added == {f"{path}/lora_{one}" for path in linear_layers(plain) for one in "ab"}
    assert {
        "patch_embedding/lora_a",
        "blocks/attn1/to_q/lora_b",
        "condition_embedder/time_proj/lora_a",
    } < added
    shapes = {path: params[f"blocks/ffn/up/{path}"].shape for path in ("lora_a", "lora_b")}
    assert shapes == {"lora_a": (3, RANK, 64), "lora_b": (3, 96, RANK)}
    assert axes["blocks/ffn/up/lora_a"] == ("layers", None, "embed")
    assert axes["blocks/ffn/up/lora_b"] == ("layers", "mlp", None)
    assert {params[path].dtype.name for path in added} == {"bfloat16"}
