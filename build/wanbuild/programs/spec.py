"""A program before it is exported: a pure function with static shapes and named inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.programs.shardings import arrays_placed
from wanrun.artifact.programs import Kernels
from wanrun.artifact.roles import FORMS, ROLES, STEPWISE, RoleName


@dataclass(frozen=True)
class ProgramSpec:
    """A program before it is exported.

    Args:
        function: takes the inputs in order and returns a dict of outputs.
        inputs: names of the inputs; a component's name stands for its weights.
        arguments: abstract arguments, one pytree per input.
        mesh: the mesh of devices that run it; None for one device.
        results: the abstract outputs with their shardings, where those are not what ``arrays_placed`` says.
        kernels: the implementations that the program is traced with.
        role: when the runtime runs it.
        place: its place among the programs of its role.
        plain: the same function by XLA's own operations, for a program that is proven by it.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    inputs: tuple[str, ...]
    arguments: tuple[Any, ...]
    donate: tuple[str, ...] = ()
    mesh: jax.sharding.Mesh | None = None
    results: Mapping[str, Any] | None = None
    kernels: Kernels | None = None
    role: RoleName = FORMS[STEPWISE].makers[0]
    place: int = 0
    plain: Callable[..., dict[str, Any]] | None = None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Sets what models ask JAX for: the mesh, the precision of float32, forms of slices and products."""
        with contextlib.ExitStack() as stack:
            if self.mesh is not None:
                stack.enter_context(jax.set_mesh(self.mesh))
            if self.kernels is not None:
                # Weights are passed as bits only to XLA's CPU backend. A text encoder, whose activations
                # have outliers, runs once a video.
                w8a8 = self.kernels.w8a8 and ROLES[self.role].when != "prompts"
                products = self.kernels.products
                forms = TraceOptions(
                    self.kernels.weight_bits, products == "widened", w8a8, products == "rounded"
                )
                stack.enter_context(tracing_with(forms))
                if self.kernels.float32_precision != "default":
                    stack.enter_context(jax.default_matmul_precision(self.kernels.float32_precision))
            yield

    @property
    def outputs(self) -> dict[str, Any]:
        """The abstract outputs by name, with their shardings on a mesh; traces the function."""
        if self.results is not None:
            return dict(self.results)
        with self.tracing():
            outputs = jax.eval_shape(self.function, *self.arguments)
            return outputs if self.mesh is None else arrays_placed(outputs, self.mesh)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(self.inputs.index(name) for name in self.donate)


def program(
    name: str,
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    donate: tuple[str, ...] = (),
    mesh: jax.sharding.Mesh | None = None,
    kernels: Kernels | None = None,
) -> ProgramSpec:
    """Makes a program of a function that takes its inputs by name and returns a dict of outputs.

    ``arguments`` are abstract, by name, in the order of the program's inputs; on a mesh, those without a
    sharding get one. The program is traced with the implementations of ``kernels``.
    """
    if mesh is not None:
        with jax.set_mesh(mesh):
            arguments = arrays_placed(arguments, mesh)

    def by_position(*values: Any) -> dict[str, Any]:
        return function(**dict(zip(arguments, values, strict=True)))

    by_position.__name__ = name
    return ProgramSpec(
        name, by_position, tuple(arguments), tuple(arguments.values()), donate, mesh, kernels=kernels
    )
