"""Meshes: the devices along each axis, and the axes that each dimension of a parameter is cut along.

| axis | what its devices share |
|---|---|
| ``data`` | the guidance pair, then the videos of a batch |
| ``ring`` | the tokens; keys and values pass from device to device |
| ``fsdp`` | the tokens, and the parameters, which are gathered layer by layer |
| ``context`` | the tokens; in the attention each device has all tokens of some heads |
| ``tensor`` | the heads, and the features of the feed-forward |

JAX's mesh has two axes for ``data``, ``guidance`` and ``videos``, and no axis of one device.
"""

from __future__ import annotations

__all__ = ["cut", "name_suffix", "paired", "shard_count"]

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from wanrun.errors import UsageError

if TYPE_CHECKING:
    import jax

    from wanrun.artifact.parameters import Component

AXES = ("data", "ring", "fsdp", "context", "tensor")
"""The axes in the order of the devices: the last one's are next to one another, and talk most."""

Sizes = Mapping[str, int]
"""Devices by axis, in any order: a manifest sorts them. An axis that is left out has one device."""

Rules = Mapping[str, Sequence[str]]
"""The mesh axes that a logical axis of a parameter, such as ``heads``, is cut along."""

Cuts = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that it is cut along."""

MAX_DEVICES = 1024

GATHERED = "fsdp"
"""The mesh axis along which parameters are stored in parts and gathered before use."""


def normal(sizes: Sizes) -> dict[str, int]:
    """Returns the axes of more than one device, in the order of ``AXES``."""
    return {axis: sizes[axis] for axis in AXES if sizes.get(axis, 1) > 1}


def check_sizes(sizes: Sizes) -> None:
    """Raises ValueError unless these are the sizes of a mesh, as ``normal`` returns them."""
    if dict(sizes) != normal(sizes) or num_devices(sizes) > MAX_DEVICES:
        raise ValueError(f"a mesh of {dict(sizes)}")


def check_rules(rules: Rules) -> None:
    """Raises ValueError unless the rules name axes of JAX's meshes, each once for a logical axis."""
    known = {"guidance", "videos", *AXES} - {"data"}
    for axis, along in rules.items():
        if len(set(along)) < len(along) or not known.issuperset(along):
            raise ValueError(f"{axis} is cut along {', '.join(along)}")


def num_devices(sizes: Sizes) -> int:
    """Returns the number of devices of a mesh."""
    return math.prod(sizes.values())


def mesh_text(sizes: Sizes) -> str:
    """Returns a mesh as ``--mesh`` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in normal(sizes).items()) or "one device"


def name_suffix(sizes: Sizes) -> str:
    """Returns a mesh's ending of its target's name: ``-data2-context4``, nothing for one device."""
    return "".join(f"-{axis}{size}" for axis, size in normal(sizes).items())


def paired(sizes: Sizes) -> bool:
    """Whether the devices of a mesh are two halves, each of which makes one of the two passes of guidance."""
    return sizes.get("data", 1) % 2 == 0


def jax_sizes(sizes: Sizes) -> dict[str, int]:
    """Returns the axes of JAX's mesh. Of an even number of devices along ``data``, halves are a pair."""
    data, pair = sizes.get("data", 1), 2 if paired(sizes) else 1
    split = {"guidance": pair, "videos": data // pair, **{axis: sizes.get(axis, 1) for axis in AXES}}
    return {axis: size for axis, size in split.items() if axis != "data" and size > 1}


def jax_mesh(sizes: Sizes, devices: Sequence[jax.Device]) -> jax.sharding.Mesh | None:
    """Returns JAX's mesh over the first of these devices; None for one device.

    Raises UsageError if there are fewer devices than the mesh has.
    """
    import jax

    if (wanted := num_devices(sizes)) == 1:
        return None
    if len(devices) < wanted:
        raise UsageError(
            "out_of_range",
            f"the mesh {mesh_text(sizes)} has more devices than there are",
            expected=f"{wanted} devices",
            found=len(devices),
        )
    named = jax_sizes(sizes)
    automatic = (jax.sharding.AxisType.Auto,) * len(named)
    return jax.make_mesh(tuple(named.values()), tuple(named), devices=devices[:wanted], axis_types=automatic)


def cut(axes: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Sizes) -> Cuts:
    """Returns along which axes of JAX's mesh a parameter is cut.

    A dimension that does not divide stays whole. ``fsdp`` only cuts matrices between two named axes: vectors
    are small, and would cost a collective each.

    Args:
        axes: the parameter's logical axes.
        sizes: the sizes of JAX's mesh.
    """
    matrix = sum(axis in rules for axis in axes) > 1
    free = {name for name in sizes if matrix or name != GATHERED}
    cuts = list[tuple[str, ...]]()
    for axis, size in zip(axes, shape, strict=True):
        along = tuple(name for name in rules.get(axis or "", ()) if name in free)
        cuts.append(along if size % math.prod(sizes[name] for name in along) == 0 else ())
        free -= set(cuts[-1])  # a mesh axis cuts one dimension
    return tuple(cuts)


def partition_spec(cuts: Sequence[Sequence[str]]) -> jax.sharding.PartitionSpec:
    """Returns cuts as JAX takes them: None for a dimension that is whole."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*(tuple(axes) or None for axes in cuts))


def shard_count(cuts: Cuts, sizes: Sizes) -> int:
    """Returns into how many parts an array is cut."""
    return math.prod(sizes[name] for along in cuts for name in along)


def device_bytes(component: Component, rules: Rules, sizes: Sizes) -> int:
    """Returns the bytes of a component's parameters on one device of JAX's mesh; sizes are empty for one."""
    return sum(
        one.layout.nbytes // shard_count(cut(one.axes, one.layout.shape, rules, sizes), sizes)
        for one in component.parameters.values()
    )
