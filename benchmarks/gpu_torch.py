"""The torch parts of gpu.py: a plain transformer block of Wan's shapes, eager and compiled, and a start.

    python gpu_torch.py NAME JSON

Written as anybody would write it: layer norm with modulation in float32, RMS norm of queries and keys over
the full width, RoPE, ``scaled_dot_product_attention`` to the tokens and to the cached keys and values of the
text, tanh GELU; bfloat16 weights. Only torch is imported.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from gpu_rows import Rows, main

TERA, GIGA = 1e12, 1e9
HEAD_SIZE, TEXT_TOKENS = 128, 512


class Attention(torch.nn.Module):
    """Projections, norms and attention; x (B, S, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = torch.nn.RMSNorm(width, 1e-6), torch.nn.RMSNorm(width, 1e-6)
        self.heads = heads

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, N, S, K)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(B, N, S, K) -> (B, S, D)."""
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to (B, N, S, K); cos and sin are float32 (S, K / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Block(torch.nn.Module):
    """Self-attention, cross-attention to cached keys and values, feed-forward."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = Attention(width, heads), Attention(width, heads)
        self.norm = torch.nn.LayerNorm(width, 1e-6)
        self.up, self.down = torch.nn.Linear(width, ffn), torch.nn.Linear(ffn, width)
        self.table = torch.nn.Parameter(torch.randn(6, width) / width**0.5)

    def modulated(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=1e-6) * (1 + scale) + shift).to(x.dtype)

    def forward(
        self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """x (B, S, D); k, v (B, N, T, K) of the text."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.table.float()
        attention, y = self.self_attention, self.modulated(x, scale_1, shift_1)
        query = rotated(attention.split(attention.norm_q(attention.q(y))), cos, sin)
        key = rotated(attention.split(attention.norm_k(attention.k(y))), cos, sin)
        y = attention.attend(query, key, attention.split(attention.v(y)))
        x = (x.float() + y * gate_1).to(x.dtype)
        attention = self.cross_attention
        query = attention.split(attention.norm_q(attention.q(self.norm(x))))
        x = x + attention.attend(query, k, v)
        y = self.down(F.gelu(self.up(self.modulated(x, scale_2, shift_2)), approximate="tanh"))
        return (x.float() + y * gate_2).to(x.dtype)


def timed(call: Callable[[], Any], repeats: int, until: float, device: str) -> list[float]:
    """Returns the seconds of some calls, after one that does not count; fewer if the time is up."""
    seconds: list[float] = []
    for number in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - started)
        if number and time.monotonic() + 1.5 * seconds[-1] > until:
            break
    return seconds[1:]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def block_flops(tokens: int, text_tokens: int, width: int, ffn: int) -> float:
    """Returns the operations of a block for one sequence: of one layer in ``gpu_device.step_flops``."""
    attention = 4 * tokens * width * (tokens + text_tokens)
    return float(12 * tokens * width**2 + attention + 4 * tokens * width * ffn)


def block(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Times one block for a guidance pair, eager and compiled; a step has as many as the model has layers.

    Raises:
        RuntimeError: if torch sees no GPU, except in a smoke run.
    """
    device = "cpu" if arguments["smoke"] else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    backend = "eager" if arguments["smoke"] else "inductor"
    for case in arguments["cases"]:
        module, given = _made(case["tokens"], case["heads"], case["ffn"], device)
        compiled = torch.compile(module, backend=backend, dynamic=False)
        for how, call in (("eager", module), ("compiled", compiled)):
            what = f"torch block {case['name']}, {how}"
            with rows.attempt(what), torch.no_grad():
                _measure(rows, what, functools.partial(call, *given), case, arguments, device)
        del module, compiled, given
    if device == "cuda":
        rows.add("peak memory", torch.cuda.max_memory_allocated() / GIGA, "GB")


def _made(tokens: int, heads: int, ffn: int, device: str) -> tuple[Block, tuple[torch.Tensor, ...]]:
    """Returns a block with random weights, and its inputs for a guidance pair, all bfloat16 but RoPE's."""
    given, width = _inputs(tokens, heads, device), heads * HEAD_SIZE
    with torch.device(device), torch.no_grad():
        return Block(width, heads, ffn).to(torch.bfloat16), given


def _inputs(tokens: int, heads: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    with torch.device(device):
        x = torch.randn(2, tokens, heads * HEAD_SIZE, dtype=torch.bfloat16)
        k, v = (torch.randn(2, heads, TEXT_TOKENS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(2))
        angles = torch.rand(tokens, HEAD_SIZE // 2) * 6.28
        return x, k, v, angles.cos(), angles.sin()


def _measure(
    rows: Rows, what: str, call: Callable[[], Any], case: Mapping[str, Any], arguments: Any, device: str
) -> None:
    started = time.perf_counter()
    call()
    _wait(device)
    first = time.perf_counter() - started
    seconds = timed(call, arguments["repeats"], arguments["until"], device)
    middle = statistics.median(seconds)
    flops = 2 * block_flops(case["tokens"], TEXT_TOKENS, case["heads"] * HEAD_SIZE, case["ffn"])
    note = f"x {case['layers']} layers: {middle * case['layers']:.3f} s a step; first call {first:.1f} s"
    tflops = flops / middle / TERA
    rows.add(what, middle * 1e3, "ms", note, tflops=tflops, flops=flops, seconds=seconds)


class Stack(torch.nn.Module):
    """Blocks, one after the other."""

    def __init__(self, layers: int, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, heads, ffn) for _ in range(layers))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *rest)
        return x


def _stack(case: Mapping[str, Any], device: str) -> Stack:
    with torch.device(device):
        stack = Stack(case["layers"], case["heads"] * HEAD_SIZE, case["heads"], case["ffn"])
    return stack.to(torch.bfloat16)


def save(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Writes random weights of all blocks as safetensors.

    Args:
        rows: gets the bytes.
        arguments: ``case``, and ``file``.
    """
    from safetensors.torch import save_file

    stack = _stack(arguments["case"], "cpu" if arguments["smoke"] else "cuda")
    save_file(stack.state_dict(), arguments["file"])
    nbytes = sum(parameter.nbytes for parameter in stack.parameters())
    rows.add("weights", nbytes / GIGA, "GB")


def start(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Times a start from the command: the weights on the device, and a first step of all blocks.

    Args:
        rows: gets the times.
        arguments: ``case`` and ``file`` of ``save``; ``how``, eager or compiled, each block alone, as
            diffusers recommends; ``spawned``, when the command was given, on time.monotonic().
    """
    from safetensors.torch import load_file

    case, how, device = arguments["case"], arguments["how"], "cpu" if arguments["smoke"] else "cuda"
    what = f"torch {case['name']}, {how}"
    stack = _stack(case, "meta")
    stack.load_state_dict(load_file(arguments["file"], device=device), assign=True)
    _wait(device)
    rows.add(f"{what}: until its weights are there", time.monotonic() - arguments["spawned"], "s")
    if how == "compiled":
        for block in stack.blocks:
            block.compile(backend="eager" if arguments["smoke"] else "inductor", dynamic=False)
    with torch.no_grad():
        stack(*_inputs(case["tokens"], case["heads"], device))
    _wait(device)
    rows.add(f"{what}: until its first step is done", time.monotonic() - arguments["spawned"], "s")


if __name__ == "__main__":
    main(MappingProxyType({"block": block, "save": save, "start": start}))
