"""Attention on NVIDIA GPUs by kernels in Mosaic GPU: unlike cuDNN's graphs they are compiled without the GPU.

What the kernels of two generations share. Groups of threads share a block of the GPU. One copies blocks of
keys and values into the stages of a ring; two have a tile of queries each, whose weights they compute. Axes
as in ``wanbuild.models.attention``.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from wanbuild.models.attention import MOSAIC_HEAD_DIM, Attention, Mask, blocked_attention

HEAD_DIM = MOSAIC_HEAD_DIM
FACTOR = HEAD_DIM**-0.5 * math.log2(math.e)
"""Factor on the scores: weights are powers of two."""

MASKED = -(2.0**103)
"""The score of a masked key. As a power of two its product with the factor is exact: where no key counts, the
difference from ``LEAST`` is zero whether a compiler rounds the product before it or not."""

LEAST = float(np.float32(FACTOR)) * MASKED
"""The largest score of masked keys, base 2."""

COMPUTING = 2
"""Groups of threads that compute weights: the first ones."""

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How the matrix units read bfloat16 from shared memory."""


@dataclass(frozen=True)
class MosaicAttention(Attention):
    """Attention by tiles of ``queries`` queries and blocks of ``keys`` keys.

    ``stages`` blocks of keys and values, at least two, are in shared memory. With ``interpret`` Pallas
    interprets the kernel, on any platform. The kernels do not take float32 or heads of another size: those
    are computed like on a CPU.
    """

    queries: int
    keys: int
    stages: int
    interpret: bool = False

    groups: ClassVar[int]
    """Groups of threads in a block: those that compute first, the one that copies last."""

    registers: ClassVar[tuple[int, int]]
    """Registers of a thread that computes, and of another. All threads of a block have 64 Ki."""

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

    @abstractmethod
    def attended(self, count: Any, group: Any, shared: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Computes the attention of one group, whose tile of queries is on its way to shared memory.

        The first ``count`` keys count, and their blocks are copied; ``shared`` holds what the groups share,
        by ``scratch``'s names. Returns the tile's result, float32 (queries, K), and the logarithms of the
        sums of weights, (queries,).
        """

    def multiply(self, count: Any, shared: Mapping[str, Any]) -> None:
        """Multiplies for the groups that compute, in a separate group where ``groups`` has one."""

    def scratch(self, stages: int) -> dict[str, Any]:
        """Returns what the groups share, by the names of a kernel's arguments.

        ``stages`` is the number of blocks of keys, and of values.
        """
        keys = plgpu.SMEM((stages, self.keys, HEAD_DIM), jnp.bfloat16, transforms=TILED)
        stage = Stages(keys, plgpu.Barrier(num_barriers=stages), self.free(stages))
        return {
            "tiles": plgpu.SMEM((COMPUTING, self.queries, HEAD_DIM), jnp.bfloat16, transforms=TILED),
            "tile_sums": plgpu.SMEM((COMPUTING, self.queries), jnp.float32),
            "tile_arrived": plgpu.Barrier(num_barriers=COMPUTING),
            "keys": stage,
            "values": stage,
        }

    @abstractmethod
    def free(self, stages: int) -> plgpu.Barrier:
        """Returns the barriers that say of each stage that its block is read."""

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
            scratch_types=self.scratch(min(self.stages, k.shape[1] // self.keys)),
            grid=(N, blocks, B),
            grid_names=("head", "block", "video"),
            num_threads=self.groups,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="mosaic_attention",
            interpret=_interpreter() if self.interpret else None,
        )
        out, sums = kernel(*counts, q, k, v)
        return out[:, :S], sums[..., :S]


def _interpreter() -> Any:
    """JAX's interpreter of groups of threads, which has no public name."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """Pads tokens with zeros: the value of a key that does not count is multiplied by zero."""
    rest = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) if rest else x


class Stages(NamedTuple):
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
        plgpu.set_max_registers(form.registers[0], action="increase")
        mine, mine_sums = shared["tiles"].at[group], shared["tile_sums"].at[group]
        plgpu.copy_gmem_to_smem(q.at[video, rows, head], mine, shared["tile_arrived"].at[group])
        attended, mine_sums[...] = form.attended(count, group, shared)
        mine[...] = attended.astype(mine.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out.at[video, rows, head])
        plgpu.copy_smem_to_gmem(mine_sums, sums.at[video, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group >= COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(form.registers[1], action="decrease")
        pl.when(group < form.groups - 1)(functools.partial(form.multiply, count, shared))
        copying = [(k, shared["keys"]), (v, shared["values"])]
        pl.when(group == form.groups - 1)(functools.partial(_copy, form, count, copying, video, head))


def _copy(
    form: MosaicAttention, count: Any, arrays: Sequence[tuple[Any, Stages]], video: Any, head: Any
) -> None:
    """Copies a head's blocks of keys and values into their stages, each when its stage is free."""
    blocks, stages = num_blocks(count, form.keys), arrays[0][1].blocks.shape[0]

    @pl.loop(0, blocks)
    def _(number: Any) -> None:
        stage, rows = jax.lax.rem(number, stages), pl.ds(number * form.keys, form.keys)
        for array, into in arrays:
            pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, into.free.at[stage]))
            block = into.blocks.at[stage]
            plgpu.copy_gmem_to_smem(array.at[video, rows, head], block, into.arrived.at[stage])

    for stage, (_, into) in itertools.product(range(stages), arrays):
        pl.when(stage < blocks)(functools.partial(plgpu.barrier_wait, into.free.at[stage]))


def weighed(
    scores: jax.Array, most: jax.Array, total: jax.Array, slack: float = 0
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weighs a block of keys, by scores float32 (queries, keys), against those before it.

    ``most`` is the largest scores before, base 2, and ``total`` the sums of weights relative to them, both
    float32 (queries,). A score, base 2, may exceed ``most`` by ``slack`` without changing it. Returns the
    weights; the factor on earlier sums, float32 (queries,); ``most`` and ``total``.
    """
    now = jnp.maximum(most, scores.max(axis=1) * FACTOR)
    if slack:
        now = jnp.where(now > most + slack, now, most)
    kept = jnp.exp2(most - now)
    weights = jnp.exp2(scores * FACTOR - by_query(now, scores.shape))
    return weights, kept, now, total * kept + weights.sum(axis=1)


def log_sums(most: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the logarithms of the sums of weights, base e; arguments are those of ``weighed``."""
    return most * math.log(2) + jnp.log(total)


def num_blocks(count: Any, keys: int) -> Any:
    """Returns the number of blocks of keys that are read: at least one, whose keys may all be masked."""
    if isinstance(count, int):
        return max(1, -(-count // keys))
    return jnp.maximum(1, jax.lax.div(count + keys - 1, keys))


def full_blocks(count: Any, keys: int) -> Any:
    """Returns the number of blocks all of whose keys count."""
    return count // keys if isinstance(count, int) else jax.lax.div(count, keys)


def by_query(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns one value for each query as an array of a shape (queries, ...)."""
    return jax.lax.broadcast_in_dim(x, shape, [0])
