"""Lowers a serialized program for a device or a mesh, in the same way on the build host and at run time."""

from __future__ import annotations

__all__ = ["UnreadableProgramError", "deserialized", "lower"]

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.errors import ArtifactError
from wanrun.executables.jax_hook import replaced

if TYPE_CHECKING:
    import jax
    import jax.stages
    from jax.export import Exported


class UnreadableProgramError(ArtifactError):
    """A serialized program that this JAX does not take: it is too old, too new, or not a program."""

    def __init__(self, name: str, reason: Exception) -> None:
        import jax

        self.reader = jax.__version__
        text = str(reason) if isinstance(reason, ValueError) else f"{type(reason).__name__}: {reason}"
        super().__init__(
            "other_release",
            f"program {name} cannot be read",
            expected=f"one that jax {self.reader} reads",
            found=text.partition(" See https://")[0].rstrip("."),
        )


def lower(
    data: bytes,
    name: str,
    donate: Sequence[str],
    where: jax.Device | jax.sharding.Mesh,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> jax.stages.Lowered:
    """Lowers an exported program for a device or a mesh, in the same way on the build host and at run time.

    Args:
        name: the name of its cache entry.
        donate: names of donated arguments; an exported call does not donate any by itself.
        where: the device or the mesh that the program will run on. The abstract arguments carry the sharding,
            because a program lowered without it misses the cache when called with committed arrays.

    Raises:
        UnreadableProgramError: if this JAX does not take the program.
    """
    import jax

    exported = deserialized(data, name)
    given, made = _shardings(exported, where)
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        for a, sharding in zip(exported.in_avals, given, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, avals)

    def call(*args: Any, **kwargs: Any) -> Any:
        return exported.call(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    with contextlib.nullcontext() if b"lapack" in data else _without_lapack():
        try:
            made["compiler_options"] = dict(options) or None
            return jax.jit(call, donate_argnames=tuple(donate), **made).lower(*args, **kwargs)
        except (ValueError, NotImplementedError, RuntimeError) as error:  # JAX reads the StableHLO here
            raise UnreadableProgramError(name, error) from error


def _shardings(
    exported: Exported, where: jax.Device | jax.sharding.Mesh
) -> tuple[Sequence[jax.sharding.Sharding], dict[str, Any]]:
    """Returns the shardings of a program's arguments, flat, and what ``jit`` gets for its results."""
    import jax

    if not isinstance(where, jax.sharding.Mesh):
        one = jax.sharding.SingleDeviceSharding(where)
        # Arguments say which device it is; of a program without any, its results do.
        return [one] * len(exported.in_avals), {} if exported.in_avals else {"out_shardings": one}
    whole = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
    given, made = exported.in_shardings_jax(where), exported.out_shardings_jax(where)
    tree = jax.tree.unflatten(exported.out_tree, [sharding or whole for sharding in made])
    return [sharding or whole for sharding in given], {"out_shardings": tree}


def deserialized(data: bytes, name: str) -> Exported:
    """Returns a serialized program, whose digest was checked.

    Raises:
        UnreadableProgramError: if this JAX does not take it.
    """
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # an older JAX may fail in many ways on a newer layout
        raise UnreadableProgramError(name, error) from error


def _without_lapack() -> contextlib.AbstractContextManager[None]:
    """Keeps JAX from importing scipy.linalg when this thread lowers an exported program for the CPU."""
    # JAX imports it to register LAPACK, which takes a quarter of the time of `import jax`, even for programs
    # that do not call LAPACK. There is no public switch; in a JAX without the function, this does nothing.
    from jax._src.export import _export

    name = "_ensure_backends_initialized"
    if not hasattr(_export, name):
        return contextlib.nullcontext()
    return replaced(_export, name, lambda own, platforms: None)
