"""The passes of ``wanbuild.models.passes`` on TPUs: Pallas kernels that read and write every value once.

XLA makes several passes of a norm and a rotation, and copies parts of heads by way of layouts with tokens as
lanes. Heads have ``LANES`` values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wanbuild.models.passes import Passes, Unrotated

LANES = 128
"""Lanes of a TPU's vector registers."""

ROWS = 512
"""Most tokens of a block."""

HEADS = 8
"""Most heads of a block: with so many tokens, 2 MB of float32."""


def rounded_up(size: int, multiple: int) -> int:
    """Returns the least multiple from a size."""
    return pl.cdiv(size, multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class TpuPasses(Passes):
    """The passes for heads of ``LANES`` values; those of other heads are XLA's.

    With ``interpret`` Pallas interprets the kernels, on any platform.
    """

    interpret: bool = False

    def rotate(
        self, x: Unrotated, cos: jax.Array, sin: jax.Array, factor: float, dtype: Any, parts: int
    ) -> jax.Array:
        """Normalises queries or keys, rotates, scales and rounds them; as ``Passes.rotate``."""
        if 2 * cos.shape[-1] != LANES:
            return super().rotate(x, cos, sin, factor, dtype, parts)
        B, S, D = x.values.shape
        blocks = _Blocks(B, S, D // LANES, parts)
        table = pl.BlockSpec((blocks.rows, LANES // 2), lambda b, part, h, s: (s, 0))
        given = [
            blocks.flat,
            pl.BlockSpec((1, blocks.rows, 1), lambda b, part, h, s: (b, s, 0)),
            pl.BlockSpec((1, blocks.width), lambda b, part, h, s: (0, part * blocks.across + h)),
            table,
            table,
        ]
        arrays = x.values, x.inverse, x.weight.astype(jnp.float32)[None], cos, sin
        kernel = functools.partial(_rotate, factor)
        out = jax.ShapeDtypeStruct((parts, B, S, D // parts), dtype)
        return self._by_block("rotate", kernel, blocks, (given, blocks.by_part), arrays, out).reshape(
            blocks.shape
        )

    def by_part(self, x: jax.Array, parts: int) -> jax.Array:
        """(B, S, N, K) -> (parts, B, S, N / parts, K)."""
        B, S, N, K = x.shape
        if parts == 1 or K != LANES:
            return super().by_part(x, parts)
        blocks = _Blocks(B, S, N, parts)
        out = jax.ShapeDtypeStruct((parts, B, S, N // parts * LANES), x.dtype)
        specs = [blocks.flat], blocks.by_part
        return self._by_block("by_part", _copy, blocks, specs, [x.reshape(B, S, -1)], out).reshape(
            blocks.shape
        )

    def joined(self, x: jax.Array) -> jax.Array:
        """Undoes ``by_part``."""
        parts, B, S, N, K = x.shape
        if parts == 1 or K != LANES:
            return super().joined(x)
        blocks = _Blocks(B, S, N * parts, parts)
        out = jax.ShapeDtypeStruct((B, S, parts * N * LANES), x.dtype)
        specs = [blocks.by_part], blocks.flat
        moved = self._by_block("joined", _copy, blocks, specs, [x.reshape(parts, B, S, -1)], out)
        return moved.reshape(B, S, parts * N, LANES)

    def _by_block(
        self,
        name: str,
        kernel: Callable[..., None],
        blocks: _Blocks,
        specs: tuple[list[pl.BlockSpec], pl.BlockSpec],
        arrays: Sequence[jax.Array],
        out: jax.ShapeDtypeStruct,
    ) -> jax.Array:
        """Runs a kernel once for every block of the arrays and of the result, cut as `specs` say."""
        given, made = specs
        return pl.pallas_call(  # type: ignore[no-any-return]
            kernel,
            grid=blocks.grid,
            in_specs=given,
            out_specs=made,
            out_shape=out,
            compiler_params=pltpu.CompilerParams(dimension_semantics=[pltpu.PARALLEL] * len(blocks.grid)),
            interpret=self.interpret,
            name=name,
        )(*arrays)


@dataclass(frozen=True)
class _Blocks:
    """Blocks of tokens and heads: a kernel has one at a time, of arrays (B, S, N·K) or (parts, B, S, N·K)."""

    batch: int
    tokens: int
    heads: int
    parts: int

    @property
    def rows(self) -> int:
        """Tokens of a block."""
        return min(ROWS, rounded_up(self.tokens, 16))

    @property
    def across(self) -> int:
        """Blocks of a part's heads."""
        return self.heads // self.parts // (self.width // LANES)

    @property
    def width(self) -> int:
        """Values of a block's heads."""
        heads = self.heads // self.parts
        return LANES * next(size for size in range(HEADS, 0, -1) if heads % size == 0)

    @property
    def grid(self) -> tuple[int, ...]:
        return self.batch, self.parts, self.across, pl.cdiv(self.tokens, self.rows)

    @property
    def flat(self) -> pl.BlockSpec:
        """Blocks of (B, S, N·K)."""
        across = self.across
        return pl.BlockSpec((1, self.rows, self.width), lambda b, part, h, s: (b, s, part * across + h))

    @property
    def by_part(self) -> pl.BlockSpec:
        """Blocks of (parts, B, S, N·K)."""
        return pl.BlockSpec((1, 1, self.rows, self.width), lambda b, part, h, s: (part, b, s, h))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (parts, B, S, N, K)."""
        return self.parts, self.batch, self.tokens, self.heads // self.parts, LANES


def _copy(given: Any, out: Any) -> None:
    """Copies a block."""
    out[...] = given[...].reshape(out.shape)


def _rotate(factor: float, values: Any, inverse: Any, weight: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotates a block, and multiplies it by a factor."""
    # values (1, rows, width), any float; inverse (1, rows, 1), weight (1, width), cos and sin (rows, `LANES`
    # / 2), all float32; out (1, 1, rows, width).
    cosines, sines = cos[...] * factor, sin[...] * factor
    cosines = jnp.concatenate([cosines, cosines], axis=-1)
    sines = jnp.concatenate([-sines, sines], axis=-1)
    for start in range(0, values.shape[-1], LANES):
        head = slice(start, start + LANES)
        normed = values[0, :, head].astype(jnp.float32) * inverse[0] * weight[:, head]
        other = pltpu.roll(normed, LANES // 2, 1)  # the halves of a head change places
        out[0, 0, :, head] = (normed * cosines + other * sines).astype(out.dtype)
