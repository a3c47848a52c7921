"""Shardings of activations on a mesh: one table, and the functions that apply it while tracing.

The mesh is the one that ``jax.set_mesh`` has set. Without one, every function here returns its argument, so
programs for one device do not depend on this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from wanrun.artifact.mesh import GATHERED, Rules, cut, partition_spec

SEQUENCE = ("ring", "fsdp", "context")
"""The axes that share the tokens, the outermost first."""

EXCHANGED = ("fsdp", "context")
"""Those axes of ``SEQUENCE`` that exchange heads for tokens in the attention (Ulysses)."""

RING = "ring"
"""The one whose devices pass their keys and values around."""

ACTIVATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "videos": ("guidance", "videos"),
        "prompts": ("guidance",),
        "tokens": SEQUENCE,
        "heads": ("tensor",),
        "mlp": ("tensor",),
        "stored_heads": ("tensor", "context", "fsdp", "ring"),  # gathered along all but the first
        "columns": ("guidance", "videos", *SEQUENCE, "tensor"),
    }
)
"""The mesh axes that an axis of an activation is cut along."""

ROTARY = "rotary_heads"
"""The axis of heads whose values are rotated: of each head first the even ones, then the odd ones, which a
checkpoint has in pairs. See ``models.rope``."""

PARAMETERS: Rules = MappingProxyType(
    {"heads": ("tensor",), ROTARY: ("tensor",), "mlp": ("tensor",), "embed": (GATHERED,)}
)
"""The mesh axes that a logical axis of a parameter is cut along. The VAE's parameters have none of these."""


def mesh_sizes() -> Mapping[str, int]:
    """Returns the devices along each axis of the mesh; empty without one."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def along(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that an activation's axis of this name and size is cut along.

    The last axes are left out until the rest divides the size.
    """
    sizes = mesh_sizes()
    axes = tuple(axis for axis in ACTIVATIONS[name] if axis in sizes)
    while size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def spec(shape: tuple[int, ...], *names: str | None) -> PartitionSpec:
    """Returns the partition of an activation whose axes have these names; None for an axis that is whole."""
    return partition_spec(
        [along(name, size) if name else () for size, name in zip(shape, names, strict=True)]
    )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Puts an activation where the names of its axes say; no name at all means whole on every device."""
    if not mesh_sizes():
        return x
    names = names or (None,) * x.ndim
    return jax.lax.with_sharding_constraint(x, spec(x.shape, *names))


def padded_count(count: int) -> int:
    """Returns the least multiple of the devices that share the tokens, from this count."""
    sizes = mesh_sizes()
    parts = math.prod(sizes.get(axis, 1) for axis in SEQUENCE)
    return -(-count // parts) * parts


def shared_tokens(x: jax.Array, axis: int) -> jax.Array:
    """Pads an axis of tokens with zeros to a multiple of the devices that share them, and cuts it."""
    if not mesh_sizes():
        return x
    extra = padded_count(x.shape[axis]) - x.shape[axis]
    if extra:
        x = jnp.pad(x, [(0, extra if index == axis else 0) for index in range(x.ndim)])
    names = ["tokens" if index == axis else None for index in range(x.ndim)]
    if axis == 1:
        names[0] = "videos"
    return constrain(x, *names)


def gathered_tokens(x: jax.Array, count: int) -> jax.Array:
    """Returns the first ``count`` tokens of (B, S, ...), whole on every device."""
    return constrain(x)[:, :count] if mesh_sizes() else x


def token_groups(count: int, groups: int) -> jax.Array | None:
    """Returns the group of each token, int32 (S,), if groups of tokens do not lie on single devices.

    Of ``count`` tokens without padding, consecutive ones are in a group; padding belongs to the last one.
    """
    if not mesh_sizes() or groups == 1:
        return None
    numbers = jnp.minimum(jnp.arange(padded_count(count), dtype=jnp.int32) // (count // groups), groups - 1)
    return constrain(numbers, "tokens")


def constrain_parameter(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Returns a parameter as a layer computes with it: gathered along the axis that only stores it in parts.

    The parameter and its logical axes are without the layer axis.
    """
    sizes = {axis: size for axis, size in mesh_sizes().items() if axis != GATHERED}
    cuts = cut(axes, x.shape, PARAMETERS, sizes)
    return jax.lax.with_sharding_constraint(x, partition_spec(cuts))
