"""Every form of the attention computes what the plain one does: see ``naive``."""

from __future__ import annotations

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
from wanbuild.models.mosaic import MosaicAttention
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import CPU

FLASH = FlashAttention(128, 16, 32, interpret=True)
MOSAIC = MosaicAttention(64, 64, 2, interpret=True)

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


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in CASES), ("blocks and a rest", "bfloat16")]
)
def test_flash(case: str, dtype: str) -> None:
    """Queries are given as the kernel takes them, scaled and then rounded."""
    (q, k, v), mask, count = arrays(case, dtype)
    factor = FLASH.query_factor(q.shape[-1])
    scaled = (q.astype(jnp.float32) * factor).astype(q.dtype)
    expected, total = naive(np.asarray(scaled, np.float64) / factor, k, v, count)
    found = FLASH(scaled, k, v, mask)  # one shard of a mesh may have one head
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    assert difference(found, expected) < FLASH_TOLERANCES[dtype]
    if dtype == "bfloat16" or case == "padding that is not known while tracing":
        out, sums = FLASH.partial(scaled, k, v, mask)
        assert out.dtype == sums.dtype == jnp.float32
        assert difference(out, expected) < FLASH_TOLERANCES[dtype]
        assert difference(sums, total) < FLASH_TOLERANCES[dtype]


def test_flash_attention_to_no_key() -> None:
    """A part of a ring may have padding alone: its result is finite and has no weight."""
    (q, k, v), _, _ = arrays("few keys", "float32")
    out, sums = FLASH.partial(q, k, v, jnp.arange(k.shape[1]) < 0)
    assert np.isfinite(out).all() and np.isfinite(sums).all() and (sums < -1e29).all()


def test_mosaic() -> None:
    """The interpreter runs three groups of threads, and the barriers between them. A part of a ring may have
    padding alone, and its number of keys is not known while tracing."""
    q, k, v = (x[:1, :140] for x in arrays("blocks and a rest", "bfloat16")[0])
    attend = jax.jit(lambda count: MOSAIC.partial(q, k, v, jnp.arange(k.shape[1]) < count))
    out, sums = attend(130)
    expected, total = naive(q, k, v, 130)
    assert out.dtype == sums.dtype == jnp.float32
    assert difference(out, expected) < FLASH_TOLERANCES["bfloat16"]  # seen: 2.1e-3
    assert difference(sums, total) < 2e-6  # seen: 3e-8
    out, sums = attend(0)
    assert np.isfinite(out).all() and np.isfinite(sums).all() and (sums < -1e29).all()


def cudnn(calls: list[Any]) -> Callable[..., jax.Array]:
    """JAX's attention, which computes in XLA what it would ask cuDNN for."""
    plain = jax.nn.dot_product_attention

    def attention(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        calls.append(implementation)
        return plain(*arrays, implementation="xla", **options)

    return attention


@pytest.mark.parametrize("case", [case for case in CASES if case != "few keys"])
def test_what_cudnn_is_asked_for(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    calls: list[str] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn(calls))
    (q, k, v), mask, count = arrays(case, "bfloat16")
    expected, _ = naive(q, k, v, count)
    assert difference(CudnnAttention()(q, k, v, mask), expected) < TOLERANCES["bfloat16"]
    assert calls == ["cudnn"]


@pytest.mark.parametrize(("case", "dtype"), [("few keys", "bfloat16"), ("padding", "float32")])
def test_what_cudnn_does_not_take(monkeypatch: pytest.MonkeyPatch, case: str, dtype: str) -> None:
    calls: list[str] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn(calls))
    (q, k, v), mask, _ = arrays(case, dtype)
    np.testing.assert_array_equal(CudnnAttention()(q, k, v, mask), blocked_attention(q, k, v, mask))
    for found, plain in zip(
        CudnnAttention().partial(q, k, v, mask), blocked_attention.partial(q, k, v, mask), strict=True
    ):
        np.testing.assert_array_equal(found, plain)
    assert calls == []


@pytest.mark.parametrize("mask", [None, 0, 300])
def test_what_cudnn_is_asked_for_of_a_part(monkeypatch: pytest.MonkeyPatch, mask: int | None) -> None:
    """Of no key at all cuDNN has no answer, and JAX's public function rounds the sums."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        assert options["return_residual"] and options["scale"] == q.shape[-1] ** -0.5
        lengths = options.get("kv_seqlen", jnp.full(len(q), k.shape[1]))
        assert ("mask_type" in options) == (mask is not None)
        assert (lengths > 0).all()
        out, total = blocked_attention.partial(q, k, v, int(lengths[0]))
        return out.astype(q.dtype), total[..., 0].transpose(0, 2, 1)

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
