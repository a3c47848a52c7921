"""Times the forms of the hot operations on this machine's CPU backend, and torch's if it is installed.

Every row names first the form that the models use. Best of a few runs each; rows of one run belong together.

    python benchmarks/kernels.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.models.attention import blocked_attention
from wanbuild.models.layers import Linear
from wanbuild.models.loops import scan
from wanbuild.models.params import abstract_params, bind
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder

REPEATS = 4
BF16 = jnp.bfloat16


def random(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(0).standard_normal(shape, np.float32) * scale
    return jnp.asarray(values, dtype)


def best_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the best of REPEATS calls of the compiled function, after one that does not count."""
    compiled = jax.jit(function).lower(*arguments).compile()
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - started)
    return min(times[1:])


def torch_seconds(make: Callable[[Any], Callable[[], Any]]) -> float | None:
    """Returns the same for torch; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    function = make(torch)
    times = []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return min(times[1:])


def stacked_matmul() -> dict[str, float | None]:
    """Feed-forward of a 1.3B block over four stacked layers, bfloat16: GFLOP/s."""
    L, M, D, F = 4, 2688, 1536, 8960
    x = random((M, D), BF16)
    up, down = random((L, F, D), BF16, 0.02), random((L, D, F), BF16, 0.02)
    as_bits = [jax.lax.bitcast_convert_type(w, jnp.uint16) for w in (up, down)]
    linears = [Linear(D, F, BF16, (None, None), bias=False), Linear(F, D, BF16, (None, None), bias=False)]

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        first, second = (bind(linear, {"weight": w}) for linear, w in zip(linears, weights, strict=True))
        hidden = jax.nn.gelu(first(x, out_dtype=jnp.float32), approximate=True).astype(BF16)
        return (x + second(hidden)).astype(BF16), None

    def naive(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        return x + jax.nn.gelu(x @ up.T, approximate=True) @ down.T, None

    flops = 4 * L * M * D * F

    def make(torch: Any) -> Callable[[], Any]:
        a, b = torch.randn(M, D).bfloat16(), torch.randn(F, D).bfloat16()
        return lambda: [torch.nn.functional.linear(a, b) for _ in range(2 * L)]

    torch_time = torch_seconds(make)
    return {
        "float32 accumulation, sliced as bits": flops
        / best_seconds(lambda x, w: scan(block, x, w)[0], x, as_bits),
        "float32 accumulation, sliced as bfloat16": flops
        / best_seconds(lambda x, w: jax.lax.scan(block, x, w)[0], x, [up, down]),
        "x @ w, sliced as bfloat16": flops
        / best_seconds(lambda x, w: jax.lax.scan(naive, x, w)[0], x, [up, down]),
        "torch, matmuls alone": flops / torch_time if torch_time else None,
    }


def attention() -> dict[str, float | None]:
    """Self-attention of two 1.3B sequences of 1 344 tokens, bfloat16: GFLOP/s."""
    B, S, N, K = 2, 1344, 12, 128
    q, k, v = (random((B, S, N, K), BF16) for _ in range(3))
    flops = 4 * B * N * S * S * K

    def make(torch: Any) -> Callable[[], Any]:
        a = torch.randn(B, N, S, K).bfloat16()
        return lambda: torch.nn.functional.scaled_dot_product_attention(a, a, a)

    torch_time = torch_seconds(make)
    return {
        "head by head": flops / best_seconds(blocked_attention, q, k, v),
        "jax.nn.dot_product_attention": flops / best_seconds(jax.nn.dot_product_attention, q, k, v),
        "torch": flops / torch_time if torch_time else None,
    }


def encode_batch() -> dict[str, float | None]:
    """Two prompts through two UMT5-XXL layers, bfloat16: seconds."""
    config = TextEncoderConfig(512, 4096, 64, 10240, 2, 64)
    module = UMT5Encoder(config)
    params = jax.tree.map(lambda a: random(a.shape, a.dtype, 0.02), abstract_params(module))
    params = jax.tree.map(
        lambda a: jax.lax.bitcast_convert_type(a, jnp.uint16) if a.dtype == BF16 else a, params
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(2, 512, (2, 512)), jnp.int32)
    mask = jnp.ones_like(ids)

    def encode(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return bind(module, params)(ids, mask, BF16)

    return {
        "one prompt at a time": 2 * best_seconds(encode, params, ids[:1], mask[:1]),
        "both in one batch": best_seconds(encode, params, ids, mask),
    }


def main() -> None:
    figures = {}
    for measure, unit, scale in (
        (stacked_matmul, "GFLOP/s", 1e9),
        (attention, "GFLOP/s", 1e9),
        (encode_batch, "s", 1.0),
    ):
        rows = figures[measure.__name__] = measure()
        print((measure.__doc__ or "").strip())
        for name, value in rows.items():
            text = "not installed" if value is None else f"{value / scale:8.2f} {unit}"
            print(f"  {name:<44} {text}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
