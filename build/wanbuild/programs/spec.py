"""A program before it is exported: a pure function with static shapes and named inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class ProgramSpec:
    """A program before it is exported.

    Args:
        name: the program's name.
        function: takes the inputs in order and returns a dict of outputs.
        inputs: names of the inputs; a component's name stands for its weights.
        arguments: abstract arguments, one pytree per input.
        donate: names of donated inputs.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    inputs: tuple[str, ...]
    arguments: tuple[Any, ...]
    donate: tuple[str, ...] = ()

    @property
    def outputs(self) -> dict[str, Any]:
        """The abstract outputs by name; traces the function."""
        return jax.eval_shape(self.function, *self.arguments)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(self.inputs.index(name) for name in self.donate)


def program(
    name: str,
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    donate: tuple[str, ...] = (),
) -> ProgramSpec:
    """Makes a program of a function that takes its inputs by name.

    Args:
        name: the program's name.
        function: takes the inputs by name and returns a dict of outputs.
        arguments: abstract arguments by name, in the order of the program's inputs.
        donate: names of donated inputs.
    """

    def by_position(*values: Any) -> dict[str, Any]:
        return function(**dict(zip(arguments, values, strict=True)))

    by_position.__name__ = name
    return ProgramSpec(name, by_position, tuple(arguments), tuple(arguments.values()), donate)
