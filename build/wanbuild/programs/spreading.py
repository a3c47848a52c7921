"""The programs ``spread_<component>``: rows of large parameters go from the devices that have them to all.

Each of N devices is given 1/N of a parameter's rows over its link to the host, and the devices exchange the
rest among themselves. Without such a program every device gets its part over that link: all of it, where the
parameter is whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from wanbuild.models.params import flatten
from wanbuild.programs.spec import ProgramSpec
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.mesh import Cuts, cut, partition_spec
from wanrun.artifact.parameters import Component
from wanrun.artifact.staged import ROWS, WEIGHTS, padded_shape, spread_name

STAGED_BYTES = 2**18
"""Parameters of fewer bytes are put on each device directly. A collective costs some 10 microseconds however
small it is, in which a link to the host of 20 GB/s brings 0.2 MB. Only norms and biases are smaller."""


def is_staged(layout: ArrayLayout) -> bool:
    """Returns whether a parameter's rows are spread: it is large, and has rows for more than one device."""
    return layout.nbytes >= STAGED_BYTES and layout.rows > 1


def spread(
    name: str, component: Component, weights: Any, rules: Mapping[str, Any], mesh: jax.sharding.Mesh
) -> ProgramSpec:
    """Returns the program that spreads a component's large parameters, of which it has some.

    Its input ``rows`` is a dict by path: a parameter, padded along axis 0 to a whole number of rows per
    device, and cut along that axis over all devices. Its output ``weights`` is a dict by path too: the same
    parameters as other programs take them.

    ``weights`` are nested dicts of the abstract parameters, with their shardings; ``rules`` has the mesh axes
    that a logical axis of a parameter is cut along.
    """
    flat = dict(flatten(weights))
    staged = {path: one for path, one in component.parameters.items() if is_staged(one.layout)}
    by_row = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = {
        path: jax.ShapeDtypeStruct(padded_shape(one.layout, mesh.size), flat[path].dtype, sharding=by_row)
        for path, one in staged.items()
    }
    cuts = {path: cut(one.axes, one.layout.shape, rules, mesh.shape) for path, one in staged.items()}

    def function(rows: Mapping[str, jax.Array]) -> dict[str, Any]:
        return {
            WEIGHTS: {path: _spread(rows[path], cuts[path], staged[path].layout.shape[0]) for path in rows}
        }

    return ProgramSpec(
        spread_name(name),
        function,
        (ROWS,),
        (rows,),
        mesh=mesh,
        results={WEIGHTS: {path: flat[path] for path in staged}},
    )


def _spread(rows: jax.Array, cuts: Cuts, length: int) -> jax.Array:
    """Sends one parameter's rows (L', ...) to the devices that need them, and leaves out the padding."""
    # Each mesh axis is one collective, the last axis first, because its devices hold consecutive rows: an
    # all-to-all along an axis that cuts another dimension of the parameter, else an all-gather. XLA's own
    # resharding gathers the whole parameter on every device, and then cuts it: for a matrix on a mesh
    # ring=2,fsdp=2,tensor=2 that sends 3.5 times the bytes and takes 3.6 times the temporary memory.
    names = jax.sharding.get_abstract_mesh().axis_names
    dimension = {axis: index for index, axes in enumerate(cuts) if index for axis in axes}
    if any(len(axes) > 1 for axes in cuts[1:]):
        raise ValueError(f"a dimension is cut along several axes: {cuts}")

    def exchanged(x: jax.Array) -> jax.Array:
        for axis in reversed(names):
            if axis in dimension:
                x = jax.lax.all_to_all(x, axis, dimension[axis], 0, tiled=True)
            else:
                x = jax.lax.all_gather(x, axis, tiled=True)
        return x[:length]

    out = partition_spec([(), *cuts[1:]])
    spreading = jax.shard_map(exchanged, in_specs=PartitionSpec(names), out_specs=out, check_vma=False)
    return spreading(rows)  # type: ignore[no-any-return]
