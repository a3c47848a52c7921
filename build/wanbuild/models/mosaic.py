"""Attention on NVIDIA GPUs of compute capability 9.0: a kernel in Mosaic GPU (arXiv:2407.08608).

Unlike cuDNN's graphs it is compiled without the GPU. Three groups of threads share a block of the GPU. One
copies blocks of keys and values into the stages of a ring; the other two have a tile of queries each, and
take turns: while one multiplies, the other computes weights. Axes as in ``wanbuild.models.attention``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from wanbuild.models.attention import MASKED, Attention, Mask, blocked_attention

HEAD_DIM = 128
FACTOR = HEAD_DIM**-0.5 * math.log2(math.e)
"""Of the scores: weights are powers of two."""

COMPUTING = 2
"""Groups of threads that compute; one more copies."""

COMPUTING_REGISTERS, COPYING_REGISTERS = 232, 40
"""Registers of a thread. Three groups of 128 threads have 64 Ki: those that copy leave theirs to others."""

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How the matrix units read bfloat16 from shared memory."""


@dataclass(frozen=True)
class MosaicAttention(Attention):
    """Computes attention by tiles of queries and blocks of keys.

    What the kernel does not take is computed like on a CPU: float32, and heads of another size.

    Args:
        queries: queries in a tile, a multiple of 64.
        keys: keys in a block, a multiple of 64.
        stages: blocks of keys and values in shared memory, at least two.
        interpret: whether Pallas interprets the kernel, on any platform.
    """

    queries: int
    keys: int
    stages: int
    interpret: bool = False

    def is_kernel(self, dtype: Any, head_dim: int) -> bool:
        """Whether the kernel takes queries of this dtype and width; as ``Attention.is_kernel``."""
        return bool(dtype == jnp.bfloat16 and head_dim == HEAD_DIM)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        """Computes attention; arguments and result as of ``BlockedAttention``."""
        return self._attend(q, k, v, mask)[0] if self._takes(q) else blocked_attention(q, k, v, mask)

    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to a part of the keys; as ``BlockedAttention.partial``."""
        if not self._takes(q):
            return blocked_attention.partial(q, k, v, mask)
        out, sums = self._attend(q, k, v, mask)
        return out.astype(jnp.float32), sums.transpose(0, 2, 1)[..., None]

    def _takes(self, q: jax.Array) -> bool:
        return self.is_kernel(q.dtype, q.shape[-1])

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> tuple[jax.Array, jax.Array]:
        """Runs the kernel; returns (B, S, N, K), and the logarithms of the sums of weights, (B, N, S)."""
        B, S, N, _ = q.shape
        known = k.shape[1] if mask is None else mask
        counts = [] if isinstance(known, int) else [jnp.sum(known, dtype=jnp.int32)[None]]
        q, k, v = _padded(q, COMPUTING * self.queries), _padded(k, self.keys), _padded(v, self.keys)
        blocks = q.shape[1] // (COMPUTING * self.queries)
        kernel = plgpu.kernel(
            functools.partial(_kernel, self, known if isinstance(known, int) else None),
            out_type=[
                jax.ShapeDtypeStruct(q.shape, q.dtype),
                jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32),
            ],
            scratch_types=self._scratch(min(self.stages, k.shape[1] // self.keys)),
            grid=(N, blocks, B),
            grid_names=("head", "block", "video"),
            num_threads=COMPUTING + 1,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="mosaic_attention",
            interpret=_interpreter() if self.interpret else None,
        )
        out, sums = kernel(*counts, q, k, v)
        return out[:, :S], sums[..., :S]

    def _scratch(self, stages: int) -> dict[str, Any]:
        """What the groups share, by ``_kernel``'s names."""
        keys = plgpu.SMEM((stages, self.keys, HEAD_DIM), jnp.bfloat16, transforms=TILED)
        arrived = plgpu.Barrier(num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages)
        return {
            "tiles": plgpu.SMEM((COMPUTING, self.queries, HEAD_DIM), jnp.bfloat16, transforms=TILED),
            "tile_sums": plgpu.SMEM((COMPUTING, self.queries), jnp.float32),
            "tile_arrived": plgpu.Barrier(num_barriers=COMPUTING),
            "keys": _Stages(keys, arrived, free),
            "values": _Stages(keys, arrived, free),
            "turn": plgpu.Barrier(num_arrivals=COMPUTING),
        }

    def held(self, x: jax.Array) -> jax.Array:
        """Spreads scores, or one value for each query, over a group's registers as matrix units have them."""
        by_query = plgpu.Layout.WGMMA.reduce(1)
        layout = plgpu.Layout.WGMMA if x.ndim == 2 else by_query
        return x if self.interpret else plgpu.layout_cast(x, layout)  # which the interpreter lacks

    def scores(self, tile: Any, keys: Any, begun: Callable[[], None]) -> jax.Array:
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

    def added(self, weighted: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        """Adds a block's values (keys, K), in shared memory, by weight."""
        if self.interpret:  # which has no sums that outlive a product
            return weighted + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        add = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values))
        return add(plgpu.ACC.init(weighted))  # type: ignore[no-any-return]


def _interpreter() -> Any:
    """JAX's interpreter of groups of threads, which has no public name."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """Pads tokens with zeros: the value of a key that does not count is multiplied by zero."""
    rest = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) if rest else x


class _Stages(NamedTuple):
    """Blocks of keys or values in shared memory, and the barriers of each: it has arrived, it is read."""

    blocks: Any
    arrived: Any
    free: Any


def _kernel(form: MosaicAttention, known: int | None, *arrays: Any, **shared: Any) -> None:
    """One group's part; arrays are a count (1,) that is not known, q, k, v and the results of ``_attend``."""
    count = arrays[0][0] if known is None else known
    q, k, v, out, sums = arrays[-5:]
    group, head, video = (jax.lax.axis_index(name) for name in ("group", "head", "video"))
    tile = jax.lax.axis_index("block") * COMPUTING + group
    rows = pl.ds(tile * form.queries, form.queries)

    @pl.when(group < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        mine, mine_sums = shared["tiles"].at[group], shared["tile_sums"].at[group]
        plgpu.copy_gmem_to_smem(q.at[video, rows, head], mine, shared["tile_arrived"].at[group])
        plgpu.barrier_wait(shared["tile_arrived"].at[group])
        weighted, most, total = _attended(form, count, group, mine, shared)
        mine[...] = (weighted * _by_query(1 / total, weighted.shape)).astype(mine.dtype)
        mine_sums[...] = most * math.log(2) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out.at[video, rows, head])
        plgpu.copy_smem_to_gmem(mine_sums, sums.at[video, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        _copy(form, count, [(k, shared["keys"]), (v, shared["values"])], video, head)


def _copy(
    form: MosaicAttention, count: Any, arrays: Sequence[tuple[Any, _Stages]], video: Any, head: Any
) -> None:
    """Copies a head's blocks of keys and values into their stages, each when its stage is free."""
    blocks, stages = _blocks(count, form.keys), arrays[0][1].blocks.shape[0]

    @pl.loop(0, blocks)
    def _(number: Any) -> None:
        stage, rows = jax.lax.rem(number, stages), pl.ds(number * form.keys, form.keys)
        for array, into in arrays:
            pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, into.free.at[stage]))
            block = into.blocks.at[stage]
            plgpu.copy_gmem_to_smem(array.at[video, rows, head], block, into.arrived.at[stage])

    for stage, (_, into) in itertools.product(range(stages), arrays):
        pl.when(stage < blocks)(functools.partial(plgpu.barrier_wait, into.free.at[stage]))


def _attended(
    form: MosaicAttention, count: Any, group: Any, tile: Any, shared: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sums of values by weight, float32; the largest scores, base 2; and the sums of weights."""
    keys, values, turn = shared["keys"], shared["values"], shared["turn"]
    stages = keys.blocks.shape[0]

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def step(number: Any, carry: tuple[jax.Array, ...], rest: bool) -> tuple[jax.Array, ...]:
        stage = jax.lax.rem(number, stages)
        plgpu.barrier_wait(keys.arrived.at[stage])
        # The turn is over when the product has begun: the other group's weights are ready.
        scores = form.scores(tile, keys.blocks.at[stage], take_turn)
        plgpu.barrier_arrive(keys.free.at[stage])
        if rest:
            numbers = form.held(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1))
            scores = jnp.where(numbers < count - number * form.keys, scores, MASKED / FACTOR)
        weights, kept, most, total = weighed(scores, *carry[1:])
        weighted = carry[0] * _by_query(kept, carry[0].shape)
        rounded = weights.astype(tile.dtype)
        # The compiler else moves work of these past the turn.
        weighted, most, total, rounded = jax.lax.optimization_barrier((weighted, most, total, rounded))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(values.arrived.at[stage])
        plgpu.barrier_wait(turn)
        weighted = form.added(weighted, rounded, values.blocks.at[stage])
        plgpu.barrier_arrive(values.free.at[stage])
        return weighted, most, total

    carry: tuple[jax.Array, jax.Array, jax.Array] = (
        form.held(jnp.zeros((form.queries, HEAD_DIM), jnp.float32)),
        form.held(jnp.full(form.queries, MASKED, jnp.float32)),
        form.held(jnp.zeros(form.queries, jnp.float32)),
    )
    full = count // form.keys if isinstance(count, int) else jax.lax.div(count, form.keys)
    pl.when(group == 1)(take_turn)
    carry = jax.lax.fori_loop(0, full, functools.partial(step, rest=False), carry)
    carry = jax.lax.fori_loop(full, _blocks(count, form.keys), functools.partial(step, rest=True), carry)
    pl.when(group == 0)(take_turn)
    return carry


def weighed(
    scores: jax.Array, most: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weighs a block of keys against those before it; see ``_attended``."""
    now = jnp.maximum(most, scores.max(axis=1) * FACTOR)
    kept = jnp.exp2(most - now)
    weights = jnp.exp2(scores * FACTOR - _by_query(now, scores.shape))
    return weights, kept, now, total * kept + weights.sum(axis=1)


def _blocks(count: Any, keys: int) -> Any:
    """The blocks of keys that are read: one at least, and all its keys may be masked."""
    if isinstance(count, int):
        return max(1, -(-count // keys))
    return jnp.maximum(1, jax.lax.div(count + keys - 1, keys))


def _by_query(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, shape, [0])
