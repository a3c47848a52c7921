"""Attention on NVIDIA GPUs of compute capability 9.0 (arXiv:2407.08608).

The two groups of threads that compute multiply themselves, with sums in registers, and take turns: while one
multiplies, the other computes weights.
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


@dataclass(frozen=True)
class WgmmaAttention(MosaicAttention):
    """Attention by the matrix units of compute capability 9.0; queries and keys are multiples of 64."""

    groups: ClassVar[int] = COMPUTING + 1
    registers: ClassVar[tuple[int, int]] = 232, 40

    def scratch(self, stages: int) -> dict[str, Any]:
        """Returns what the groups share; see ``MosaicAttention.scratch``."""
        return {**super().scratch(stages), "turn": plgpu.Barrier(num_arrivals=COMPUTING)}

    def free(self, stages: int) -> plgpu.Barrier:
        """Returns barriers at which both groups arrive."""
        return plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages)

    def attended(self, count: Any, group: Any, shared: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Computes a group's attention; see ``MosaicAttention.attended``."""
        tile, keys, values, turn = shared["tiles"].at[group], shared["keys"], shared["values"], shared["turn"]
        stages = keys.blocks.shape[0]
        plgpu.barrier_wait(shared["tile_arrived"].at[group])

        def take_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(number: Any, carry: tuple[jax.Array, ...], rest: bool) -> tuple[jax.Array, ...]:
            stage = jax.lax.rem(number, stages)
            plgpu.barrier_wait(keys.arrived.at[stage])
            # The turn is over when the product has begun: the other group's weights are ready.
            scores = self._scores(tile, keys.blocks.at[stage], take_turn)
            plgpu.barrier_arrive(keys.free.at[stage])
            if rest:
                numbers = self._held(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1))
                scores = jnp.where(numbers < count - number * self.keys, scores, MASKED)
            weighted, most, total = carry
            weights, kept, most, total = weighed(scores, most, total)
            weighted = weighted * by_query(kept, weighted.shape)
            rounded = weights.astype(tile.dtype)
            # The compiler else moves work of these past the turn.
            weighted, most, total, rounded = jax.lax.optimization_barrier((weighted, most, total, rounded))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(values.arrived.at[stage])
            plgpu.barrier_wait(turn)
            weighted = self._added(weighted, rounded, values.blocks.at[stage])
            plgpu.barrier_arrive(values.free.at[stage])
            return weighted, most, total

        carry: tuple[jax.Array, jax.Array, jax.Array] = (
            self._held(jnp.zeros((self.queries, HEAD_DIM), jnp.float32)),
            self._held(jnp.full(self.queries, LEAST, jnp.float32)),
            self._held(jnp.zeros(self.queries, jnp.float32)),
        )
        full = full_blocks(count, self.keys)
        pl.when(group == 1)(take_turn)
        carry = jax.lax.fori_loop(0, full, functools.partial(step, rest=False), carry)
        carry = jax.lax.fori_loop(
            full, num_blocks(count, self.keys), functools.partial(step, rest=True), carry
        )
        pl.when(group == 0)(take_turn)
        weighted, most, total = carry
        return weighted * by_query(1 / total, weighted.shape), log_sums(most, total)

    def _held(self, x: jax.Array) -> jax.Array:
        """Spreads scores, or one value for each query, over a group's registers as matrix units have them."""
        layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
        return x if self.interpret else plgpu.layout_cast(x, layout)  # which the interpreter lacks

    def _scores(self, tile: Any, keys: Any, begun: Callable[[], None]) -> jax.Array:
        """Multiplies a tile of queries by a block of keys, both in shared memory: float32 (queries, keys)."""
        if self.interpret:  # which does not transpose
            begun()
            return jnp.dot(tile[...], keys[...].T, preferred_element_type=jnp.float32)

        def multiply(scores: Any) -> jax.Array:
            plgpu.wgmma(scores, tile, plgpu.transpose_ref(keys, (1, 0)))
            begun()
            return scores[...]  # type: ignore[no-any-return]

        sums = plgpu.ACC((self.queries, self.keys), jnp.float32)
        return pl.run_scoped(multiply, sums)  # type: ignore[no-any-return]

    def _added(self, weighted: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        """Adds a block's values (keys, K), in shared memory, by weight."""
        if self.interpret:  # which has no sums that outlive a product
            return weighted + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        add = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values))
        return add(plgpu.ACC.init(weighted))  # type: ignore[no-any-return]
