"""Every form of the attention computes what the plain one does, as do its passes and shared tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.devices import on_devices
from helpers.naive import order_of_halves
from wanbuild.models.attention import Attention, blocked_attention
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.cudnn import CudnnAttention
from wanbuild.models.flash import FlashAttention
from wanbuild.models.mosaic import FACTOR, LEAST, MASKED, log_sums, weighed
from wanbuild.models.mosaic_tcgen05 import SLACK, Tcgen05Attention
from wanbuild.models.mosaic_wgmma import WgmmaAttention
from wanbuild.models.passes import Passes, Unrotated
from wanbuild.models.rope import apply_rope
from wanbuild.models.tpu_passes import TpuPasses
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.umt5 import SCORES_BYTES, _attention, relative_position_buckets
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


# The TPU's kernels around the attention do what the plain passes do.


PLAIN, TPU = Passes(), TpuPasses(interpret=True)


def array(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "parts"),
    [(700, 3, 128, 1), (37, 12, 128, 2), (20, 18, 128, 2), (9, 4, 32, 2)],
    ids=["two blocks", "parts", "two blocks of a part's heads", "other heads"],
)
def test_norm_and_rotation(tokens: int, heads: int, width: int, parts: int) -> None:
    x = Unrotated(array(0, 2, tokens, heads * width), array(1, 2, tokens, 1), array(2, heads * width))
    arguments: tuple[Any, ...] = (array(3, tokens, width // 2), array(4, tokens, width // 2), 0.3)
    found, plain = (one.rotate(x, *arguments, jnp.float32, parts) for one in (TPU, PLAIN))
    assert found.shape == (parts, 2, tokens, heads // parts, width)
    np.testing.assert_allclose(found, plain, rtol=2e-6, atol=2e-6)
    rounded = Unrotated(x.values.astype(jnp.bfloat16), x.inverse, x.weight)
    found, plain = (one.rotate(rounded, *arguments, jnp.bfloat16, parts) for one in (TPU, PLAIN))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), plain.astype(jnp.float32), rtol=8e-3, atol=1e-6)


@pytest.mark.slow
def test_parts() -> None:
    x = array(0, 2, 530, 4, 128)
    parts = TPU.by_part(x, 2)
    np.testing.assert_array_equal(parts, np.asarray(x).reshape(2, 530, 2, 2, 128).transpose(2, 0, 1, 3, 4))
    np.testing.assert_array_equal(TPU.joined(parts), x)
    np.testing.assert_array_equal(PLAIN.joined(PLAIN.by_part(x, 2)), x)


# Rotation in halves, of both forms, is the rotation of neighbours whose rows are reordered.


@pytest.mark.parametrize("cpu", [True, False])
def test_halves_are_neighbours(cpu: bool) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 5, 3, 12)).astype(np.float32)
    angles = rng.uniform(0, 6, (5, 6)).astype(np.float32)
    pairs = x.astype(np.float64).reshape(2, 5, 3, 6, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles.astype(np.float64))[:, None]
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    order = order_of_halves(12, 12)
    with tracing_with(TraceOptions(cpu=cpu)):
        found = jax.jit(apply_rope)(x[..., order], np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(found, expected[..., order], atol=1e-6)


# Attention of tokens that several devices share, around the TPU's kernel: Ulysses, ring and both.


DEVICES = 4
MESHES = ({"context": 4}, {"ring": 4}, {"ring": 2, "context": 2})


def compare() -> None:
    """Runs in a process with virtual devices: 150 tokens, which do not divide, and four heads."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from wanbuild.models.attention import blocked_attention
    from wanbuild.models.flash import FlashAttention
    from wanbuild.models.partition import shared_tokens
    from wanbuild.models.passes import Unrotated
    from wanbuild.models.sequence import TokenAttention
    from wanrun.artifact.mesh import jax_mesh

    count, heads, width = 150, 4, 128
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def attend(kernel: Any, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
        tokens = TokenAttention(kernel, count)
        q, k = (Unrotated(shared_tokens(x.values, 1), shared_tokens(x.inverse, 1), x.weight) for x in (q, k))
        v, cos, sin = shared_tokens(v, 1), shared_tokens(cos, 0), shared_tokens(sin, 0)
        image, real = v[:1, :33], jnp.arange(33) < 30
        return tokens.among(q, k, v, cos, sin), tokens.to(tokens.scaled(v, v.dtype), image, image, real)

    q, k = (
        Unrotated(array(2, count, heads * width), array(2, count, 1), array(heads * width)) for _ in range(2)
    )
    given = q, k, array(2, count, heads, width), array(count, width // 2), array(count, width // 2)
    expected = attend(blocked_attention, *given)
    kernel = FlashAttention(64, 16, 32, interpret=True)
    for sizes in MESHES:
        mesh = jax_mesh(sizes, jax.devices())
        assert mesh is not None
        with jax.set_mesh(mesh):
            found = jax.jit(functools.partial(attend, kernel))(*given)
        for one, plain in zip(found, expected, strict=True):
            one = np.asarray(one)[:, :count]
            error = np.linalg.norm(one - plain) / np.linalg.norm(plain)
            assert error < 2e-6, (sizes, error)
        print("compared", *sizes)


@pytest.mark.thorough
def test_attention_of_shared_tokens() -> None:
    assert on_devices(DEVICES, compare).split("\n") == [*(" ".join(("compared", *m)) for m in MESHES), ""]


# The text encoder's attention by groups of heads, on a CPU, and of all heads at once.


P, N, K = 1, 12, 16


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("widened", [False, True])
def test_groups_of_heads(tokens: int, widened: bool) -> None:
    rng = np.random.default_rng(tokens)
    q, k, v = (jnp.asarray(rng.standard_normal((P, tokens, N, K)), jnp.float32) for _ in range(3))
    table = jnp.asarray(rng.standard_normal((32, N)), jnp.float32)
    by_distance = relative_position_buckets(tokens, 32, 128)
    positions = np.arange(tokens)
    buckets = jnp.asarray(by_distance[positions[None] - positions[:, None] + tokens - 1])
    mask = jnp.arange(tokens)[None] < tokens - 5
    texts, results = [], []
    for forms in (TraceOptions(cpu=True, widened=widened), TraceOptions(cpu=False)):
        with tracing_with(forms):
            lowered = jax.jit(lambda *a: _attention(*a)).lower(q, k, v, table, buckets, mask)
        texts.append(lowered.as_text())
        results.append(np.asarray(lowered.compile()(q, k, v, table, buckets, mask)))
    in_groups = 4 * P * N * tokens**2 > SCORES_BYTES
    assert ["while" in text for text in texts] == [in_groups, False]
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-6 * np.abs(results[1]).max())
