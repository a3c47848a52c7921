"""Attention on NVIDIA GPUs of compute capability 10.0 (arXiv:2603.05451).

Scores, weights and sums are in the memory of the matrix units, "tensor memory", of 128 rows: a thread that
computes has one query. A third group of threads starts all products. They end in the order in which they
start: so scores are written where the weights of the same tile lie that the product before them reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from wanbuild.models.mosaic import (
    COMPUTING,
    HEAD_DIM,
    LEAST,
    MASKED,
    MosaicAttention,
    by_query,
    full_blocks,
    log_sums,
    num_blocks,
    weighed,
)

SLACK = 8
"""The most by which a score, base 2, may exceed the one that weights are relative to. Sums are multiplied
only where it exceeds it by more, which is seldom: weights are at most 2^8."""

COLUMNS = 32
"""Columns of sums that are multiplied at once: a thread holds its scores meanwhile."""

BY_ROW = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""How registers hold what is in tensor memory: a row for each thread."""


@dataclass(frozen=True)
class Tcgen05Attention(MosaicAttention):
    """Attention by the matrix units of compute capability 10.0; ``queries`` are 128, ``keys`` at most 128."""

    groups: ClassVar[int] = COMPUTING + 2
    registers: ClassVar[tuple[int, int]] = 216, 40

    def scratch(self, stages: int) -> dict[str, Any]:
        """Returns what the groups share; see ``MosaicAttention.scratch``."""
        kept = self._tensor_memory((self.queries, COMPUTING * self.keys), jnp.float32)
        # The same columns as the scores', of which they fill half.
        weights = self._tensor_memory((self.queries, COMPUTING * 2 * self.keys), jnp.bfloat16)
        return {
            **super().scratch(stages),
            "scores": [kept, weights] if self.interpret else plgpu.RefUnion(kept, weights),
            "weighted": self._tensor_memory((self.queries, COMPUTING * HEAD_DIM), jnp.float32),
            "ready": plgpu.Barrier(num_barriers=COMPUTING, orders_tensor_core=True),
            "weights_ready": plgpu.Barrier(num_barriers=COMPUTING, orders_tensor_core=True),
        }

    def free(self, stages: int) -> plgpu.Barrier:
        """Returns barriers at which products that read a block arrive."""
        return plgpu.Barrier(num_barriers=stages, orders_tensor_core=True)

    def attended(self, count: Any, group: Any, shared: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Computes a group's attention; see ``MosaicAttention.attended``."""
        scores_of, weights_of = self._tiles(shared)
        ready = shared["ready"].at[group]

        def step(number: Any, carry: tuple[jax.Array, jax.Array], rest: bool) -> tuple[jax.Array, jax.Array]:
            plgpu.barrier_wait(ready)
            scores = self._loaded(scores_of(group))
            if rest:
                numbers = self._held(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1))
                scores = jnp.where(numbers < count - number * self.keys, scores, MASKED)
            weights, kept, most, total = weighed(scores, *carry, SLACK)
            self._multiply_sums(shared["weighted"], group, kept)
            self._store(weights_of(group), weights.astype(jnp.bfloat16))
            self._commit()
            plgpu.barrier_arrive(shared["weights_ready"].at[group])
            return most, total

        carry = (
            self._held(jnp.full(self.queries, LEAST, jnp.float32)),
            self._held(jnp.zeros(self.queries, jnp.float32)),
        )
        full = full_blocks(count, self.keys)
        carry = jax.lax.fori_loop(0, full, functools.partial(step, rest=False), carry)
        most, total = jax.lax.fori_loop(
            full, num_blocks(count, self.keys), functools.partial(step, rest=True), carry
        )
        plgpu.barrier_wait(ready)
        self._multiply_sums(shared["weighted"], group, 1 / total)
        self._commit()
        weighted = self._loaded(_columns(shared["weighted"], group, HEAD_DIM), plgpu.Layout.TCGEN05)
        return weighted, log_sums(most, total)

    def multiply(self, count: Any, shared: Mapping[str, Any]) -> None:
        """Starts the products of both tiles with each block, in turn; see ``MosaicAttention.multiply``."""
        keys, values = shared["keys"], shared["values"]
        scores_of, weights_of = self._tiles(shared)
        stages, blocks = keys.blocks.shape[0], num_blocks(count, self.keys)

        def score(tile: int, stage: Any) -> None:
            block = keys.blocks.at[stage]
            self._product(scores_of(tile), shared["tiles"].at[tile], block, more=False, transposed=True)

        plgpu.barrier_wait(keys.arrived.at[0])
        for tile in range(COMPUTING):
            plgpu.barrier_wait(shared["tile_arrived"].at[tile])
            score(tile, 0)
            self._arrive(shared["ready"].at[tile])
        self._arrive(keys.free.at[0])

        @pl.loop(0, blocks)
        def _(number: Any) -> None:
            stage, following = (jax.lax.rem(n, stages) for n in (number, number + 1))
            goes_on = number + 1 < blocks
            plgpu.barrier_wait(values.arrived.at[stage])
            for tile in range(COMPUTING):
                plgpu.barrier_wait(shared["weights_ready"].at[tile])
                weighted = _columns(shared["weighted"], tile, HEAD_DIM)
                self._product(weighted, weights_of(tile), values.blocks.at[stage], more=number > 0)
                if tile == 0:
                    pl.when(goes_on)(functools.partial(plgpu.barrier_wait, keys.arrived.at[following]))
                pl.when(goes_on)(functools.partial(score, tile, following))
                self._arrive(shared["ready"].at[tile])
            self._arrive(values.free.at[stage])
            pl.when(goes_on)(functools.partial(self._arrive, keys.free.at[following]))

    def _tensor_memory(self, shape: tuple[int, int], dtype: Any) -> Any:
        """A matrix in tensor memory: float32, or two bfloat16 values in a column."""
        if self.interpret:  # which only has shared memory
            return plgpu.SMEM(shape, dtype)
        return plgpu.TMEM(shape, dtype, packed=True if dtype == jnp.bfloat16 else None)

    def _tiles(self, shared: Mapping[str, Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Functions of a tile's number: its scores, and its weights in the first half of the same columns."""
        scores, weights = shared["scores"]

        def scores_of(tile: Any) -> Any:
            return _columns(scores, tile, self.keys)

        def weights_of(tile: Any) -> Any:
            return weights.at[:, pl.ds(tile * 2 * self.keys, self.keys)]

        return scores_of, weights_of

    def _product(self, into: Any, left: Any, right: Any, more: Any, transposed: bool = False) -> None:
        """Starts a product, added to ``into`` with ``more``; ``right`` is in shared memory."""
        if self.interpret:
            by = right[...].T if transposed else right[...]
            before = jnp.where(more, into[...], 0)
            into[...] = before + jnp.dot(left[...], by, preferred_element_type=jnp.float32)
        else:
            by = plgpu.transpose_ref(right, (1, 0)) if transposed else right
            plgpu.tcgen05_mma(into, left, by, accumulate=more)

    def _arrive(self, barrier: Any) -> None:
        """Lets the products that were started arrive at a barrier."""
        (plgpu.barrier_arrive if self.interpret else plgpu.tcgen05_commit_arrive)(barrier)

    def _held(self, x: jax.Array) -> jax.Array:
        """Spreads scores, or one value for each query, over a group's registers by row."""
        layout = BY_ROW if x.ndim == 2 else BY_ROW.reduce(1)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def _loaded(self, columns: Any, layout: plgpu.Layout = BY_ROW) -> jax.Array:
        """Loads from tensor memory to its end."""
        if self.interpret:
            return columns[...]  # type: ignore[no-any-return]
        loaded = plgpu.async_load_tmem(columns, layout=layout)
        plgpu.wait_load_tmem()
        return loaded

    def _store(self, columns: Any, x: jax.Array) -> None:
        """Starts to store in tensor memory."""
        if self.interpret:
            columns[...] = x
        else:
            plgpu.async_store_tmem(columns, x)

    def _commit(self) -> None:
        """Ends stores in tensor memory."""
        if not self.interpret:
            plgpu.commit_tmem()

    def _multiply_sums(self, sums: Any, tile: Any, by: jax.Array) -> None:
        """Multiplies a tile's sums by one value for each query, in warps where one is not 1."""

        # No product adds to them meanwhile: the one before has ended, since the scores after it are there.
        @pl.when(jnp.any(by != 1) if self.interpret else _any_in_warp(by))
        def _() -> None:
            for start in range(0, HEAD_DIM, COLUMNS):
                part = sums.at[:, pl.ds(tile * HEAD_DIM + start, COLUMNS)]
                x = self._loaded(part)
                self._store(part, x * by_query(by, x.shape))


def _columns(ref: Any, tile: Any, count: int) -> Any:
    """A tile's columns of a matrix in tensor memory."""
    return ref.at[:, pl.ds(tile * count, count)]


def _any_in_warp(x: jax.Array) -> jax.Array:
    """Whether a value (queries,) of a warp is not 1: its threads get one answer, other warps their own."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import llvm
    from jax.experimental.mosaic import gpu as mgpu

    def vote(_: Any, values: Any) -> Any:
        one = "setp.neu.f32 p, $1, 0f3F800000;"
        text = f"{{ .reg .pred p; {one} vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }}"
        integer = ir.IntegerType.get_signless(32)
        (value,) = values.registers.flat
        voted: Any = llvm.inline_asm(integer, [value], text, "=r,f", has_side_effects=True)
        return mgpu.FragmentedArray.splat(voted, (), is_signed=True)

    answer = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    voted = plgpu.inline_mgpu(arg_types=(BY_ROW.reduce(1),), return_type=answer)(vote)(x)
    return voted != 0  # type: ignore[no-any-return]
