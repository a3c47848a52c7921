"""Shardings of programs' arguments and results on a mesh, and the meshes that a profile can have."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from wanbuild.models import blocks, columns, face, partition
from wanbuild.models.params import flatten
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.vae import HISTORY
from wanbuild.programs.shape import Shape
from wanrun import EIGHT_BITS
from wanrun.artifact.mesh import AXES, Sizes, cut, mesh_text, normal, num_devices, paired, partition_spec
from wanrun.errors import UsageError


def weights_placed(params: Any, axes: Mapping[str, tuple[str | None, ...]], mesh: jax.sharding.Mesh) -> Any:
    """Returns abstract weights with their shardings.

    ``params`` are nested dicts of ``jax.ShapeDtypeStruct``; ``axes`` has the logical axes of each, by path.
    """

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = axes["/".join(entry.key for entry in path)]
        cuts = cut(names, leaf.shape, partition.PARAMETERS, mesh.shape)
        return _with(leaf, NamedSharding(mesh, partition_spec(cuts)))

    return jax.tree_util.tree_map_with_path(placed, params)


def check_blocks(params: Any, layers: Mapping[str, str]) -> None:
    """Checks that a mesh cuts weights only between blocks that have one scale; no published model is cut so.

    ``params`` is what ``weights_placed`` returns; ``layers`` has the form of each layer of 8-bit weights, by
    path. Raises UsageError if a mesh cuts a weight and its scales in different ways.
    """
    placed = dict(flatten(params))
    for path, form in layers.items():
        block, weight, scale = EIGHT_BITS[form].block, placed[f"{path}/weight"], placed[f"{path}/scale"]
        if block and weight.sharding.spec != scale.sharding.spec:
            raise UsageError(
                "mismatch",
                f"the mesh does not work: it cuts blocks of {block} weights that have one scale",
                expected="devices among which whole blocks are shared",
                found=f"{path}, {weight.shape[-1]} inputs in {scale.shape[-1]} blocks",
                remedy="use another mesh, or convert with --quantise int8",
            )


def arrays_placed(arrays: Mapping[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns arguments or results with shardings: caches, tables and histories are cut, the rest is whole.

    ``arrays`` has abstract arrays, or trees of them, by the name of the argument or result. Those that have a
    sharding keep it. The mesh has to be JAX's current one too.
    """

    def placed(name: str, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.sharding is not None:
            return leaf
        names = _names([name, *(entry.key for entry in path)], leaf.shape)
        return _with(leaf, NamedSharding(mesh, partition.spec(leaf.shape, *names)))

    # One by one: JAX would sort the names, and programs take their inputs in the order of theirs.
    return {
        name: jax.tree_util.tree_map_with_path(functools.partial(placed, name), tree)
        for name, tree in arrays.items()
    }


def _names(keys: list[str], shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Returns the names of an array's axes: see ``partition.ACTIVATIONS``."""
    if keys[0] == "rope":
        return "tokens", None
    if keys[0] == "kv" and len(shape) == 6:
        return None, *face.STORED
    if keys[0] == "kv" and keys[-1] in blocks.STORED:
        return None, *blocks.STORED[keys[-1]]
    if keys[0] == HISTORY:
        return *columns.STORED, *(None,) * (len(shape) - len(columns.STORED))
    return (None,) * len(shape)


def _with(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_mesh(
    sizes: Sizes, config: TransformerConfig, shape: Shape, available: int, nag: bool = False
) -> None:
    """Checks that a mesh suits a profile; raises UsageError, which names the nearest mesh that works.

    ``sizes`` has devices by axis, ``available`` is the number of devices of the target, and ``nag`` is
    whether steps can take a negative prompt without guidance.
    """
    if (wrong := mesh_problem(sizes, config, shape, available, nag)) is None:
        return
    what, expected, found = wrong
    others = (other for count in range(1, available + 1) for other in meshes(count))
    works = [other for other in others if mesh_problem(other, config, shape, available, nag) is None]
    nearest = min(works, key=lambda other: _distance(sizes, other))
    remedy = f"use --mesh {mesh_text(nearest)}" if nearest else "leave out --mesh"
    raise UsageError(
        "mismatch",
        f"the mesh {mesh_text(sizes)} does not work: {what}",
        expected=expected,
        found=found,
        remedy=remedy,
    )


def mesh_problem(
    sizes: Sizes, config: TransformerConfig, shape: Shape, available: int, nag: bool = False
) -> tuple[str, str, object] | None:
    """Returns why a mesh does not work: what, expected and found; None if it does."""
    if num_devices(sizes) > available:
        return "it has more devices than there are", f"at most {available}", num_devices(sizes)
    if config.chunks is not None and num_devices(sizes) > 1:
        return "a video is made in chunks on one device", "1", num_devices(sizes)
    exchanged = {axis: sizes.get(axis, 1) for axis in ("fsdp", "context", "tensor")}
    parts, heads = math.prod(exchanged.values()), config.num_attention_heads
    if heads % parts:
        names = " x ".join(axis for axis, size in exchanged.items() if size > 1)
        return f"the heads are not divisible by {names}", f"a divisor of {heads}", parts
    data, videos = sizes.get("data", 1), shape.num_videos
    # Halves of an even number of devices make the two passes of guidance at once.
    pairs = {n: 2 if shape.guidance and paired({"data": n}) else 1 for n in range(1, 2 * videos + 1)}
    fitting = [n for n, passes in pairs.items() if passes * videos % n == 0]
    if data not in fitting:
        kind = f"{videos} video(s), guidance {'on' if shape.guidance else 'off'}"
        return f"data does not divide the batch ({kind})", " or ".join(map(str, fitting)), data
    if nag and pairs[data] > 1:
        return (
            "its halves make the two passes of guidance at once, which --nag is not for",
            "an odd number",
            data,
        )
    return None


def meshes(count: int, axes: Sequence[str] = AXES) -> Iterator[dict[str, int]]:
    """Yields every mesh of exactly this many devices; sizes above 16 are powers of two."""
    first, *others = axes
    for size in (n for n in range(1, count + 1) if count % n == 0 and (n <= 16 or not n & (n - 1))):
        if others:
            for rest in meshes(count // size, others):
                yield normal({first: size, **rest})
        elif size == count:
            yield normal({first: size})


def _distance(wanted: Sizes, other: Sizes) -> tuple[float, float, tuple[int, ...]]:
    """Returns the distance of a mesh from the wanted one: in devices first, then along each axis."""
    difference = [math.log2(wanted.get(axis, 1) / other.get(axis, 1)) for axis in AXES]
    order = tuple(-other.get(axis, 1) for axis in AXES)
    return abs(sum(difference)), sum(map(abs, difference)), order
