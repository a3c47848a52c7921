"""Attention on TPUs: a Pallas kernel whose scores never leave the chip (arXiv:2205.14135, 2307.08691).

The kernel reads queries, keys and values as projections write them, (B, S, N·K). Scores are computed
transposed, (keys, queries): the largest are then taken over sublanes, and the second product fills a matrix
unit of 256 columns with queries, of which K would fill half. Tiles are unrolled, and the scores of later ones
are computed before earlier ones are used, so that matrix and vector units work at once. Axes as in
``wanbuild.models.attention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wanbuild.models.attention import MASKED, Attention, Mask
from wanbuild.models.tpu_passes import LANES, TpuPasses, rounded_up

ONES = 16
"""Rows of ones that are multiplied with the values: the smallest number that bfloat16's tiles allow."""

GROUP = 4
"""Tiles of queries that are unrolled: with more, compilers take longer than they gain."""

BLOCK_ROWS = (7, 6, 5, 4)
"""Numbers of rows of tiles that a block of keys may have: with fewer, units fill and drain too often."""

AHEAD = 3
"""Tiles whose scores are computed ahead."""

SMALLEST = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class FlashAttention(TpuPasses, Attention):
    """Attention by blocks of queries and keys, which are computed in tiles.

    A block of ``queries`` queries stays in the chip's memory while blocks of keys go by. With ``interpret``
    Pallas interprets the kernels, on any platform.
    """

    queries: int
    tile_queries: int
    tile_keys: int

    def query_factor(self, head_dim: int) -> float:
        """Returns what queries are multiplied by before they are rounded: weights are powers of two."""
        return head_dim**-0.5 * math.log2(math.e)

    def is_kernel(self, dtype: Any, head_dim: int) -> bool:
        """Returns True: see ``Attention.is_kernel``."""
        return True

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        """Computes attention; arguments and result as of ``BlockedAttention``."""
        return self._attend(q, k, v, mask, partial=False)[0]  # type: ignore[no-any-return]

    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to a part of the keys; as ``BlockedAttention.partial``."""
        out, sums = self._attend(q, k, v, mask, partial=True)
        return out, sums.transpose(0, 3, 1, 2) * math.log(2)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, partial: bool) -> Any:
        """Runs the kernel once; returns (B, S, N, K) and, if partial, sums in powers of two (B, N, 1, S)."""
        B, S, N, K = q.shape
        T, width = k.shape[1], rounded_up(K, LANES)
        group = min(GROUP * self.tile_queries, rounded_up(S, self.tile_queries))
        rows = min(self.queries, rounded_up(S, group))
        known = T if mask is None else mask
        most = known if isinstance(known, int) else T
        keys = self.tile_keys * _rows_of_tiles(most, self.tile_keys)
        count = jnp.reshape(jnp.asarray(known, jnp.int32).sum(), 1)
        ends_full = isinstance(known, int) and known % keys == 0
        tiles = _Tiles(self.tile_queries, self.tile_keys, group // self.tile_queries, S, keys <= T, ends_full)
        queries = pl.BlockSpec((1, rows, width), lambda b, n, i, j, count: (b, i, n))
        blocks = pl.BlockSpec((1, keys, width), lambda b, n, i, j, count: (b, j, n))
        out = jax.ShapeDtypeStruct((B, S, N * width), jnp.float32 if partial else q.dtype)
        sums = jax.ShapeDtypeStruct((B, N, 1, S), jnp.float32)
        sums_block = pl.BlockSpec((1, 1, 1, rows), lambda b, n, i, j, count: (b, n, 0, i))
        results = pl.pallas_call(
            functools.partial(_kernel, tiles),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(B, N, pl.cdiv(S, rows), pl.cdiv(most, keys)),
                in_specs=[queries, blocks, blocks],
                out_specs=[queries, sums_block] if partial else [queries],
                scratch_shapes=[
                    pltpu.VMEM((1, rows), jnp.float32),
                    pltpu.VMEM((width + ONES, rows), jnp.float32),
                ],
            ),
            out_shape=[out, sums] if partial else [out],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            interpret=self.interpret,
            name="flash_attention",
        )(count, *(_flat(x, width) for x in (q, k, v)))
        return results[0].reshape(B, S, N, width)[..., :K], *results[1:]


def _rows_of_tiles(keys: int, tile: int) -> int:
    """Returns how many rows of tiles a block of keys has: the number that leaves least over."""
    # What fills no block is computed a row at a time, which takes half as long again.
    rows = pl.cdiv(keys, tile)
    fitting = [number for number in BLOCK_ROWS if number * tile <= keys] or [rows]
    return min(fitting, key=lambda number: rows - keys // (number * tile) * number)


@dataclass(frozen=True)
class _Tiles:
    """How a block is computed: ``group`` tiles of queries are unrolled, of ``all_queries`` queries.

    All keys count of some blocks if ``some_full``, of every block if ``ends_full``.
    """

    queries: int
    keys: int
    group: int
    all_queries: int
    some_full: bool
    ends_full: bool


def _kernel(tiles: _Tiles, count: Any, q: Any, k: Any, v: Any, out: Any, *others: Any) -> None:
    """Adds one block of keys to a block of queries, and writes the result after the last one."""
    # count, in scalar memory: of the keys that count; q and out (1, block of queries, K), k and v (1, block
    # of keys, K). others: an output of sums (1, 1, 1, block of queries), if one is wanted. Then what is kept
    # from block to block, float32: the largest scores (1, block of queries), and the weighted sums of values
    # and of ones (K + `ONES`, block of queries).
    most, weighted = others[-2:]
    keys, width, block = k.shape[1], q.shape[2], pl.program_id(3)
    rest = jnp.clip(count[0] - block * keys, 0, keys)
    queries = jnp.minimum(tiles.all_queries - pl.program_id(2) * q.shape[1], q.shape[1])
    add = functools.partial(_add_keys, tiles, queries, q, k, v, most, weighted)

    @pl.when(block == 0)
    def _() -> None:
        most[...] = jnp.full_like(most, MASKED)
        weighted[...] = jnp.zeros_like(weighted)

    def some() -> None:
        rows = jax.lax.div(rest + tiles.keys - 1, tiles.keys)
        jax.lax.fori_loop(0, rows, lambda row, carry: add([row], rest), None)

    if tiles.some_full:
        pl.when(rest == keys)(lambda: add(range(keys // tiles.keys)))
    if not tiles.ends_full:
        pl.when(rest < keys)(some)

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        sums = jnp.maximum(weighted[width : width + 1], SMALLEST)
        out[0] = (weighted[:width] / sums).T.astype(out.dtype)
        if len(others) == 3:
            others[0][0, 0] = most[...] + jnp.log2(sums)


def _add_keys(
    tiles: _Tiles,
    queries: Any,
    q: Any,
    k: Any,
    v: Any,
    most: Any,
    weighted: Any,
    rows: Sequence[Any],
    count: Any = None,
) -> None:
    """Adds rows of tiles to all queries of a block; of its keys `count` count, None for all."""
    # The keys that do not count may be anything.
    places = [(row, column) for row in rows for column in range(tiles.group)]

    def one_group(group: Any, carry: None) -> None:
        slices = [
            (_at(row, tiles.keys), _at(group * tiles.group + column, tiles.queries)) for row, column in places
        ]
        ahead = [_scores(q[0, columns], k[0, keys]) for keys, columns in slices[:AHEAD]]
        for number, (keys, columns) in enumerate(slices):
            scores, values = ahead.pop(0), v[0, keys]
            if number + AHEAD < len(slices):
                later, of = slices[number + AHEAD]
                ahead.append(_scores(q[0, of], k[0, later]))
            if count is not None:
                numbers = jax.lax.broadcasted_iota(jnp.int32, (tiles.keys, 1), 0)
                real = numbers + places[number][0] * tiles.keys < count
                scores = jnp.where(real, scores, MASKED)
                values = jnp.where(real, values, jnp.zeros_like(values))
            _add_tile(scores, values, columns, most, weighted)

    size = tiles.group * tiles.queries
    jax.lax.fori_loop(0, jax.lax.div(queries + size - 1, size), one_group, None)


def _add_tile(scores: jax.Array, values: jax.Array, columns: Any, most: Any, weighted: Any) -> None:
    """Adds a tile's values, and ones, by weight: scores float32 (keys, queries), values (keys, K)."""
    before = most[:, columns]
    now = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
    weights, kept = jnp.exp2(scores - now).astype(values.dtype), jnp.exp2(before - now)
    # Matrix units add up the weights too: they have time for it, and vector units have not.
    summed = jnp.concatenate([values.T, jnp.ones((ONES, len(values)), values.dtype)], axis=0)
    weighted[:, columns] = weighted[:, columns] * kept + _dot(summed, weights, 0)
    most[:, columns] = now


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """(queries, K) and (keys, K) -> float32 (keys, queries)."""
    return _dot(k, q, 1)


def _dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Multiplies matrices over the first one's last axis and this axis of the second; float32."""
    # A product of bfloat16 has no higher precision, and Mosaic refuses to be asked for one.
    exact = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _at(number: Any, size: int) -> Any:
    return pl.ds(number * size, size)


def _flat(x: jax.Array, width: int) -> jax.Array:
    """(B, S, N, K) -> (B, S, N·K'), heads padded with zeros to a width."""
    B, S, N, K = x.shape
    if width != K:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - K)))
    return x.reshape(B, S, N * width)
