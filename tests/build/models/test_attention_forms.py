"""Every form of the attention computes what the plain one does: see ``naive``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.attention import Attention, blocked_attention
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.cudnn import CudnnAttention
from wanbuild.models.flash import FlashAttention
from wanbuild.models.mosaic import FACTOR, LEAST, MASKED, log_sums, weighed
from wanbuild.models.mosaic_tcgen05 import SLACK, Tcgen05Attention
from wanbuild.models.mosaic_wgmma import WgmmaAttention
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import CPU

FLASH = FlashAttention(128, 16, 32, interpret=True)

FORMS: dict[str, Attention] = {
    "cpu": blocked_attention,
    "flash": FLASH,
    "cudnn": CudnnAttention(),
    "wgmma": WgmmaAttention(64, 64, 2, interpret=True),
    "tcgen05": Tcgen05Attention(64, 64, 2, interpret=True),
}

CASES = {
    "odd lengths": (1, 333, 205, 2, 128, None),
    "whole blocks of keys": (1, 130, 512, 1, 128, None),
    "blocks and a rest": (2, 77, 600, 1, 128, None),
    "padding": (1, 300, 640, 1, 128, 514),
    "blocks of padding": (1, 20, 640, 1, 128, 70),
    "padding that is not known while tracing": (1, 40, 384, 2, 64, "array"),
    "few keys": (2, 10, 7, 2, 12, 5),
}
"""Batch, queries, keys, heads, head dimension, and which keys count."""

TOLERANCES = {"float32": 2e-6, "bfloat16": 8e-3}
"""Relative; seen: 9e-7, and 4e-3 of cuDNN's place holder, whose sums are rounded."""

FLASH_TOLERANCES = {"float32": 2e-6, "bfloat16": 3e-3}
"""Relative; seen: 7e-7, and 2.2e-3, of which rounding the result is 1.7e-3."""


def naive(q: jax.Array | np.ndarray, k: jax.Array, v: jax.Array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The result, (B, S, N, K), and the logarithm of the sum of weights, (B, S, N, 1), in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k[:, :count], v[:, :count]))
    scores = np.einsum("bsnk,btnk->bnst", q, k) / np.sqrt(q.shape[-1])
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnk->bsnk", weights / total, v)
    return out, (most + np.log(total)).transpose(0, 2, 1, 3)


def arrays(case: str, dtype: str) -> tuple[list[jax.Array], Any, int]:
    """Random q, k and v, the mask, and the number of keys that count."""
    B, S, T, N, K, mask = CASES[case]
    rng = np.random.default_rng(len(case))
    shapes = (B, S, N, K), (B, T, N, K), (B, T, N, K)
    qkv = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    if mask == "array":
        return qkv, jnp.arange(T) < T - 97, T - 97
    return qkv, mask, T if mask is None else mask


def difference(found: jax.Array, expected: np.ndarray) -> float:
    found = np.asarray(found, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in CASES if case != "odd lengths"])
def test_flash(case: str, dtype: str = "float32") -> None:
    """Queries are given as the kernel takes them, scaled and then rounded."""
    (q, k, v), mask, count = arrays(case, dtype)
    factor = FLASH.query_factor(q.shape[-1])
    scaled = (q.astype(jnp.float32) * factor).astype(q.dtype)
    expected, total = naive(np.asarray(scaled, np.float64) / factor, k, v, count)
    found = FLASH(scaled, k, v, mask)  # one shard of a mesh may have one head
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    assert difference(found, expected) < FLASH_TOLERANCES[dtype]
    if case == "padding that is not known while tracing":
        out, sums = FLASH.partial(scaled, k, v, mask)
        assert out.dtype == sums.dtype == jnp.float32
        assert difference(out, expected) < FLASH_TOLERANCES[dtype]
        assert difference(sums, total) < FLASH_TOLERANCES[dtype]


@pytest.mark.slow
def test_flash_attention_to_no_key() -> None:
    """A part of a ring may have padding alone: its result is finite and has no weight."""
    (q, k, v), _, _ = arrays("few keys", "float32")
    out, sums = FLASH.partial(q, k, v, jnp.arange(k.shape[1]) < 0)
    assert np.isfinite(out).all() and np.isfinite(sums).all() and (sums < -1e29).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMS)
def test_every_form_at_odd_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a ring whose number of keys is not known while tracing; scores grow from block to block.

    JAX's interpreter runs the groups of threads of kernels in Mosaic GPU, and the barriers between them.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "dot_product_attention", rounded)
    form, (q, k, v) = FORMS[name], (x[:1, :141] for x in arrays("blocks and a rest", "bfloat16")[0])
    k = k * jnp.linspace(0, 8, k.shape[1], dtype=k.dtype)[:, None, None]
    factor = form.query_factor(q.shape[-1])
    scaled = (q.astype(jnp.float32) * factor).astype(q.dtype)
    out, sums = jax.jit(form.partial)(scaled, k, v, jnp.arange(k.shape[1]) < 133)
    expected, total = naive(np.asarray(scaled, np.float64) / factor, k, v, 133)
    assert out.dtype == sums.dtype == jnp.float32
    assert difference(out, expected) < FLASH_TOLERANCES["bfloat16"]
    assert difference(sums, total) < 3e-5  # seen: 1.6e-5 of flash, which adds rounded weights; else 5e-8


@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, SLACK])
def test_weights_of_blocks_of_a_kernel_in_mosaic_gpu(slack: float) -> None:
    """Of no key at all the sum has no weight, also where XLA multiplies and subtracts at once, as ptxas does.
    Larger scores change what weights are relative to, or not."""
    scores = jnp.stack([jnp.linspace(0, last, 24) for last in (0, 1, 9, 90)]) / FACTOR
    most, total = jnp.full(4, LEAST), jnp.zeros(4)
    weigh = jax.jit(functools.partial(weighed, slack=slack))
    _, _, *none = weigh(jnp.full((4, 8), MASKED), most, total)
    assert np.isfinite(log_sums(*none)).all() and (log_sums(*none) < -1e29).all()
    for block in jnp.split(scores, 3, axis=1):
        weights, kept, most, total = weigh(block, most, total)
        assert weights.max() < 1.001 * 2**slack and kept.max() <= 1
    expected = jax.nn.logsumexp(scores * FACTOR * np.log(2), axis=1)
    np.testing.assert_allclose(log_sums(most, total), expected, rtol=1e-6)
    largest = [True, False, False, True] if slack else [True] * 4
    np.testing.assert_array_equal(jnp.isclose(most, scores.max(axis=1) * FACTOR), largest)


def rounded(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """JAX's call of cuDNN for a part of the keys, computed in XLA."""
    lengths = options.get("kv_seqlen", jnp.full(len(q), k.shape[1]))
    out, total = blocked_attention.partial(q, k, v, jnp.arange(k.shape[1]) < lengths[0])
    return out.astype(q.dtype), total[..., 0].transpose(0, 2, 1)


def cudnn(calls: list[Any]) -> Callable[..., jax.Array]:
    """JAX's attention, which computes in XLA what it would ask cuDNN for."""
    plain = jax.nn.dot_product_attention

    def attention(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        calls.append(implementation)
        return plain(*arrays, implementation="xla", **options)

    return attention


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", ["odd lengths", "blocks of padding", "padding that is not known while tracing"]
)
def test_what_cudnn_is_asked_for(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    calls: list[str] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn(calls))
    (q, k, v), mask, count = arrays(case, "bfloat16")
    expected, _ = naive(q, k, v, count)
    assert difference(CudnnAttention()(q, k, v, mask), expected) < TOLERANCES["bfloat16"]
    assert calls == ["cudnn"]


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "dtype"), [("few keys", "bfloat16"), ("padding", "float32")])
def test_what_kernels_of_gpus_do_not_take(monkeypatch: pytest.MonkeyPatch, case: str, dtype: str) -> None:
    """None is called: neither cuDNN nor one in Mosaic GPU runs here. Those of Mosaic GPU share the choice."""
    calls: list[str] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn(calls))
    (q, k, v), mask, _ = arrays(case, dtype)
    plain = blocked_attention(q, k, v, mask), *blocked_attention.partial(q, k, v, mask)
    for form in (CudnnAttention(), Tcgen05Attention(128, 128, 2)):
        for found, expected in zip((form(q, k, v, mask), *form.partial(q, k, v, mask)), plain, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert calls == []


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, 0])
def test_what_cudnn_is_asked_for_of_a_part(monkeypatch: pytest.MonkeyPatch, mask: int | None) -> None:
    """Of no key at all cuDNN has no answer, and JAX's public function rounds the sums."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def attention(*qkv: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        assert options["return_residual"] and options["scale"] == qkv[0].shape[-1] ** -0.5
        assert ("mask_type" in options) == (mask is not None)
        assert "kv_seqlen" not in options or (options["kv_seqlen"] > 0).all()
        return rounded(*qkv, **options)

    monkeypatch.setattr(fused, "dot_product_attention", attention)
    (q, k, v), _, _ = arrays("blocks and a rest", "bfloat16")
    out, total = CudnnAttention().partial(q, k, v, mask)
    if mask == 0:
        assert (total < -1e29).all() and np.isfinite(total).all()
        return
    expected, sums = naive(q, k, v, k.shape[1] if mask is None else mask)
    assert difference(out, expected) < TOLERANCES["bfloat16"]
    assert difference(total, sums) < 1e-6


def test_the_form_of_every_target() -> None:
    forms: dict[str, Attention] = {name: attention_form(chip.kernels) for name, chip in CHIPS.items()}
    assert {type(form) for name, form in forms.items() if CHIPS[name].platform == "tpu"} == {FlashAttention}
    assert {type(form) for name, form in forms.items() if CHIPS[name].platform == "cuda"} == {CudnnAttention}
    assert attention_form(CPU) is blocked_attention
