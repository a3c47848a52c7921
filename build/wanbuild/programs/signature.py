"""Compares what a program's file takes and gives with what the manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wanrun.artifact.layout import BITS
from wanrun.artifact.parameters import Component, nest
from wanrun.artifact.programs import Program
from wanrun.errors import ArtifactError

if TYPE_CHECKING:
    from jax.export import Exported


def aval_text(dtype: str, *sizes: int) -> str:
    """How an array of this dtype and shape is described: ``float32[2,3]``."""
    return f"{dtype}[{','.join(map(str, sizes))}]"


def check_signature(
    name: str, program: Program, components: Mapping[str, Component], bits: bool, exported: Exported
) -> None:
    """Checks that a program takes the inputs and returns the outputs that the manifest says, by name.

    Two inputs of one shape that the manifest exchanges would give another video, without an error.

    Args:
        name: the program.
        program: what the manifest says of it.
        components: the artifact's weights; an input of such a name is of its parameters.
        bits: whether weights of ``BITS`` are passed as integers.
        exported: what the file holds.

    Raises:
        ArtifactError: naming the first difference.
    """
    import jax

    def described(tree: Any, avals: Any) -> Any:
        texts = [aval_text(str(one.dtype), *one.shape) for one in avals]
        return jax.tree.unflatten(tree, texts)

    by_position, inputs = described(exported.in_tree, exported.in_avals)
    found = {"inputs": inputs, "outputs": described(exported.out_tree, exported.out_avals)}
    recorded = program.avals.get("inputs", {})
    given = {
        key: weights_described(components[key], bits) if key in components else recorded.get(key, "nothing")
        for key in program.inputs
    }
    expected = {"inputs": given, "outputs": program.avals.get("outputs", {})}
    other = difference(expected, found)
    if by_position:
        other = "its inputs", "names", f"{len(by_position)} without"
    elif exported.fun_name != name:
        other = "its name", name, exported.fun_name
    if other is not None:
        raise unlike(f"program {name} is not what the manifest says", other)


def weights_described(component: Component, bits: bool) -> Any:
    """A component's parameters as a program takes them: nested dicts of texts such as ``float32[2,3]``."""

    def text(dtype: str, shape: tuple[int, ...]) -> str:
        return aval_text(BITS.get(dtype, dtype) if bits else dtype, *shape)

    layouts = {path: parameter.layout for path, parameter in component.parameters.items()}
    return nest({path: text(layout.dtype, layout.shape) for path, layout in layouts.items()})


def difference(expected: Any, found: Any, where: str = "") -> tuple[str, str, str] | None:
    """Where two trees of texts differ first, by name, and what is there in each; None if nowhere."""
    if expected == found:
        return None
    if not (isinstance(expected, Mapping) and isinstance(found, Mapping)):
        return where, _shown(expected), _shown(found)
    for key in sorted(expected.keys() | found.keys()):
        place = f"{where}.{key}" if where else str(key)
        other = difference(expected.get(key, "nothing"), found.get(key, "nothing"), place)
        if other is not None:
            return other
    return None


def unlike(what: str, other: tuple[str, str, str]) -> ArtifactError:
    """The error about two trees that differ, of what ``difference`` returned."""
    where, said, there = other
    return ArtifactError(f"{what}: {where}", expected=said, found=there, remedy="build the artifact again")


def _shown(tree: Any) -> str:
    return f"a dict of {len(tree)}" if isinstance(tree, Mapping) else str(tree)
