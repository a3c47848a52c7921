"""Programs of a denoising loop, one for each form, that are small enough to compile for a test.

The model is v = scale·tanh(x) + t / 1000.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.programs.denoiser import solver_step
from wanbuild.programs.export import describe, export_program
from wanbuild.programs.spec import ProgramSpec, program
from wanrun.artifact.programs import Program, with_role
from wanrun.artifact.roles import RoleName
from wanrun.denoising.solvers import COLUMNS, HISTORY
from wanrun.executables.executables import LoadedProgram, lower

SHAPE = (1, 2, 3, 4, 5)
MAX_STEPS = 16
SCALES: Mapping[str, float] = {"transformer": 0.5, "transformer_2": -0.25}
FULL: Mapping[str, str] = {"step": "denoise_step", "scan": "denoise_loop"}


Update = Callable[..., tuple[Any, dict[str, Any]]]
"""Takes and returns what ``solver_step`` does."""


def full_step(
    transformer: Any,
    latents: Any,
    history: Any,
    coefficients: Any,
    timestep: Any,
    update: Update = solver_step,
) -> dict[str, Any]:
    x, past = jax.tree.map(lambda array: array.astype(jnp.float32), (latents, history))
    v = transformer["scale"] * jnp.tanh(x) + timestep / 1000
    x, past = update(x, v, past, coefficients)
    return jax.tree.map(lambda array: array.astype(latents.dtype), {"latents": x, "history": past})


def _loop(step: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The loop over the steps [first, last), as the toolchain makes it of a step."""

    def loop(coefficients: Any, timesteps: Any, first: Any, last: Any, **arguments: Any) -> dict[str, Any]:
        state = {name: arguments.pop(name) for name in ("latents", "history")}

        def body(index: Any, state: dict[str, Any]) -> dict[str, Any]:
            return step(**arguments, **state, coefficients=coefficients[index], timestep=timesteps[index])

        return jax.lax.fori_loop(first, last, body, state)  # type: ignore[no-any-return]

    return loop


def _specs(dtype: str, update: Update, max_steps: int) -> list[ProgramSpec]:
    step = functools.partial(full_step, update=update)
    latents, index = jax.ShapeDtypeStruct(SHAPE, jnp.dtype(dtype)), jax.ShapeDtypeStruct((), jnp.int32)
    state = {"latents": latents, "history": dict.fromkeys(HISTORY, latents)}
    weights = {"transformer": {"scale": jax.ShapeDtypeStruct((), jnp.float32)}}

    def rows(*length: int) -> dict[str, Any]:
        names = ("coefficients", "timesteps" if length else "timestep")
        sizes = ((*length, len(COLUMNS)), length)
        return {
            name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in zip(names, sizes, strict=True)
        }

    bounds = {"first": index, "last": index}
    return [
        program(FULL["step"], step, {**weights, **state, **rows()}, tuple(state)),
        program(FULL["scan"], _loop(step), {**weights, **state, **rows(max_steps), **bounds}, tuple(state)),
    ]


@dataclass
class SmallPrograms:
    """Gives a ``Sampler`` the programs of this module; there is nothing to load.

    Attributes:
        records: as a manifest has them.
        bound_names: what was bound, in order: a program, and its transformer.
    """

    records: Mapping[str, Program]
    compiled: Mapping[str, LoadedProgram]
    bound_names: list[tuple[str, str]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Program:
        return self.records[name]

    def with_role(self, *roles: str) -> tuple[str, ...]:
        return with_role(self.records, *roles)

    def of_expert(
        self, name: str, expert: str, loras: Sequence[Any] = ()
    ) -> Callable[..., Mapping[str, Any]]:
        if name == "prepare":
            self.bound_names.append((name, expert))
            return lambda **inputs: {}
        self.bound_names.append((name, expert))
        weights = {"transformer": {"scale": np.float32(SCALES[expert])}}
        return functools.partial(self.compiled[name], **weights)

    def expect(self, experts: Sequence[str]) -> list[Any]:
        return []


@functools.cache
def _built(
    dtype: str, update: Update, max_steps: int
) -> tuple[Mapping[str, Program], Mapping[str, LoadedProgram]]:
    records, compiled = {}, {}
    for spec in _specs(dtype, update, max_steps):
        donate = spec.donate_argnums
        form: RoleName = "step" if spec.name.endswith("step") else "scan"
        avals = describe(spec, {"transformer"})
        records[spec.name] = Program("p", "", spec.inputs, donate, avals, form)
        lowered = lower(export_program(spec, "cpu"), spec.name, spec.donate, jax.devices("cpu")[0])
        compiled[spec.name] = LoadedProgram(lowered.compile(), spec.inputs)
    records["prepare"] = Program(
        "p", "", ("transformer", "embeddings"), (), {"inputs": {}, "outputs": {}}, "prepare"
    )
    return records, compiled


def small_programs(
    dtype: str = "float32", update: Update = solver_step, max_steps: int = MAX_STEPS
) -> SmallPrograms:
    """The programs, with latents and history of this dtype.

    Args:
        dtype: the dtype.
        update: updates the solver's state.
        max_steps: rows of the loop's table.
    """
    return SmallPrograms(*_built(dtype, update, max_steps))
