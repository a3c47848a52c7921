"""Times the forms of the hot operations on this machine's CPU backend, and torch's if it is installed.

Best of a few runs each; rows of one run belong together. Which are used where: docs/notes/cpu.md, "Forms".

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

from cpus import cpu_name, fair_dtype
from wanbuild.models.attention import blocked_attention
from wanbuild.models.convolution import conv3x3x3
from wanbuild.models.layers import Linear
from wanbuild.models.loops import scan
from wanbuild.models.params import bind, scan_layers, stacked
from wanbuild.models.tracing import TraceOptions, tracing_with

REPEATS = 4
BF16 = jnp.bfloat16
NATIVE, WIDENED = TraceOptions(), TraceOptions(widened=True)

Rows = dict[str, float]
"""Operations per second by form."""


def random(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(0).standard_normal(shape, np.float32) * scale
    return jnp.asarray(values, dtype)


def best_seconds(function: Callable[..., Any], *arguments: Any, forms: TraceOptions = NATIVE) -> float:
    """Returns the best of REPEATS calls of the compiled function, after one that does not count."""
    with tracing_with(forms):
        # A function of its own: jax.jit would take what it traced for the other forms.
        compiled = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments).compile()
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


def torch_rate(flops: float, make: Callable[[Any, Any], Callable[[], Any]]) -> Rows:
    """Returns torch's rate in float32, and in bfloat16 if this CPU has instructions for it, because otherwise
    that is a plain loop; nothing if torch is not installed.

    Args:
        flops: operations of one call.
        make: takes torch and a dtype; returns the function to time.
    """
    rates: Rows = {}
    for dtype in dict.fromkeys((fair_dtype("cpu"), "float32")):
        seconds = torch_seconds(lambda torch, dtype=dtype: make(torch, getattr(torch, dtype)))
        if seconds is not None:
            rates[f"torch, {dtype}"] = flops / seconds
    return rates


def many_rows() -> Rows:
    """Feed-forward of a 1.3B block over four stacked layers, 2 688 rows"""
    L, M, D, F = 4, 2688, 1536, 8960
    x = random((M, D), BF16)
    up, down = random((L, F, D), BF16, 0.02), random((L, D, F), BF16, 0.02)
    as_bits = [jax.lax.bitcast_convert_type(w, jnp.uint16) for w in (up, down)]
    linears = [Linear(D, F, BF16, (None, None), bias=False), Linear(F, D, BF16, (None, None), bias=False)]

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        first, second = (bind(linear, {"weight": w}) for linear, w in zip(linears, weights, strict=True))
        hidden = jax.nn.gelu(first(x, out_dtype=jnp.float32), approximate=True).astype(BF16)
        return (x + second(hidden)).astype(BF16), None

    def unbarred(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        wide = jnp.float32
        first, second = (
            bind(linear, {"weight": w.astype(wide)}) for linear, w in zip(linears, weights, strict=True)
        )
        hidden = jax.nn.gelu(first(x.astype(wide)), approximate=True).astype(BF16)
        return (x + second(hidden.astype(wide))).astype(BF16), None

    def naive(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        return x + jax.nn.gelu(x @ up.T, approximate=True) @ down.T, None

    def in_loop(body: Any, loop: Any = scan) -> Callable[..., Any]:
        return lambda x, w: loop(body, x, w)[0]

    def make(torch: Any, dtype: Any) -> Callable[[], Any]:
        a, b = torch.randn(M, D).to(dtype), torch.randn(F, D).to(dtype)
        return lambda: [torch.nn.functional.linear(a, b) for _ in range(2 * L)]

    flops = 4 * L * M * D * F
    return {
        "bfloat16, sliced as bits": flops / best_seconds(in_loop(block), x, as_bits),
        "widened, with a barrier": flops / best_seconds(in_loop(block), x, as_bits, forms=WIDENED),
        "widened, without": flops / best_seconds(in_loop(unbarred), x, as_bits),
        "bfloat16, sliced as bfloat16": flops / best_seconds(in_loop(block, jax.lax.scan), x, [up, down]),
        "x @ w, sliced as bfloat16": flops / best_seconds(in_loop(naive, jax.lax.scan), x, [up, down]),
        **torch_rate(flops, make),
    }


def few_rows(rows: int) -> Rows:
    """Layers of UMT5-XXL, 4 096 to 10 240, two of them stacked"""
    L, D, F = 2, 4096, 10240
    x, weight = random((rows, D), BF16), random((L, F, D), BF16, 0.02)
    linear = stacked(Linear(D, F, BF16, (None, None), bias=False), L)
    stack = {"weight": jax.lax.bitcast_convert_type(weight, jnp.uint16)}

    def by_block(x: jax.Array, stack: Any) -> jax.Array:
        out = jnp.zeros((rows, F), jnp.float32)
        return scan_layers(bind(linear, stack), lambda layer, out, _: out + layer(x, jnp.float32), out)

    def whole(x: jax.Array, stack: Any) -> jax.Array:
        layer = Linear(D, F, BF16, (None, None), bias=False)
        out = jnp.zeros((rows, F), jnp.float32)
        return scan(lambda out, one: (out + bind(layer, one)(x, jnp.float32), None), out, stack)[0]

    def make(torch: Any, dtype: Any) -> Callable[[], Any]:
        a, weights = torch.randn(rows, D).to(dtype), [torch.randn(F, D).to(dtype) for _ in range(L)]
        return lambda: [torch.nn.functional.linear(a, weight) for weight in weights]

    flops = 2 * L * rows * D * F
    return {
        "bfloat16, sliced block by block": flops / best_seconds(by_block, x, stack),
        "widened, sliced block by block": flops / best_seconds(by_block, x, stack, forms=WIDENED),
        "bfloat16, a layer sliced at once": flops / best_seconds(whole, x, stack),
        "widened, a layer sliced at once": flops / best_seconds(whole, x, stack, forms=WIDENED),
        **torch_rate(flops, make),
    }


def attention() -> Rows:
    """Self-attention of two 1.3B sequences of 1 344 tokens"""
    B, S, N, K = 2, 1344, 12, 128
    q, k, v = (random((B, S, N, K), BF16) for _ in range(3))

    def make(torch: Any, dtype: Any) -> Callable[[], Any]:
        a = torch.randn(B, N, S, K).to(dtype)
        return lambda: torch.nn.functional.scaled_dot_product_attention(a, a, a)

    flops = 4 * B * N * S * S * K
    return {
        "head by head, bfloat16": flops / best_seconds(blocked_attention, q, k, v),
        "head by head, widened": flops / best_seconds(blocked_attention, q, k, v, forms=WIDENED),
        "jax.nn.dot_product_attention": flops / best_seconds(jax.nn.dot_product_attention, q, k, v),
        **torch_rate(flops, make),
    }


def convolution() -> Rows:
    """3x3x3, 192 channels, 4 frames of 128x224, in operations of the direct sum"""
    T, H, W, C = 4, 128, 224, 192
    x, kernel = random((1, T + 2, H, W, C), jnp.float32), random((3, 3, 3, C, C), jnp.float32, 0.02)
    flops = 2 * 27 * T * H * W * C * C

    def make(torch: Any, dtype: Any) -> Callable[[], Any]:
        a, b = torch.randn(1, C, T + 2, H + 2, W + 2).to(dtype), torch.randn(C, C, 3, 3, 3).to(dtype)
        return lambda: torch.nn.functional.conv3d(a, b)

    def seconds(algorithm: str, dtype: Any) -> float:
        return best_seconds(
            lambda x, kernel: conv3x3x3(x, kernel, algorithm), x.astype(dtype), kernel.astype(dtype)
        )

    return {
        "Winograd, float32": flops / seconds("winograd", jnp.float32),
        "Winograd, bfloat16": flops / seconds("winograd", BF16),
        "direct, float32": flops / seconds("direct", jnp.float32),
        **torch_rate(flops, make),
    }


def main() -> None:
    print(cpu_name())
    figures: dict[str, Rows] = {}
    for measure, *arguments in (
        (many_rows,),
        *((few_rows, rows) for rows in (64, 128, 256, 512)),
        (attention,),
        (convolution,),
    ):
        name = " ".join([measure.__name__, *map(str, arguments)])
        rows = figures[name] = measure(*arguments)
        print(f"{name}: {(measure.__doc__ or '').strip()}, GFLOP/s")
        for form, rate in rows.items():
            print(f"  {form:<44} {rate / 1e9:8.0f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
