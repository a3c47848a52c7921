"""Compiles the programs of a generation from their shapes alone, and takes the compiler's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from wanbuild.plan.generation import Generation, tree_bytes
from wanbuild.plan.memory import Figures, usable
from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.compiler import compiled_for
from wanbuild.programs.export import export_program
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.streaming import STACKS
from wanbuild.programs.too_large import TooLargeError
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.roles import FORMS, ROLES, RoleName
from wanrun.weights.layers import OUTSIDE


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Args:
        name: its name.
        role: its role.
        seconds: that the compiler took.
        figures: its bytes.
    """

    name: str
    role: RoleName
    seconds: float
    figures: Figures


WEIGHTS = (OUTSIDE, *STACKS)
"""Inputs of those programs that are weights."""


def programs(generation: Generation, target: TargetSpec) -> Iterator[ProgramSpec]:
    """Yields the programs for a target; the loop first, as it is most likely to be too large."""
    streamed = next(name for name, form in FORMS.items() if form.streams)
    loop = streamed if generation.streams else generation.options.loop
    options = replace(generation.options, loop=loop)
    builder = ProgramBuilder(generation.manifest, generation.shape, options, *target.programs_for)
    yield from sorted(generation.specs(builder), key=lambda spec: ROLES[spec.role].when != "steps")


def compile_program(generation: Generation, spec: ProgramSpec, target: TargetSpec) -> Compiled:
    """Exports and compiles one program, as ``wanbuild compile`` does, and keeps nothing.

    Of a program that the compiler refuses for its size, what it needs beside weights counts as temporaries.
    """
    started = time.perf_counter()
    data = export_program(spec, target.platform)
    try:
        compiled = compiled_for(target, spec.name, data, spec.donate)
    except TooLargeError as error:
        weights = sum(generation.weights(name, target.mesh) for name in _components(generation, spec))
        weights = weights or _nbytes(spec, WEIGHTS)
        figures = Figures(weights, 0, max(0, error.nbytes - weights), refused=True)
        return Compiled(spec.name, spec.role, time.perf_counter() - started, figures)
    memory: Any = compiled.memory_analysis()
    figures = Figures(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )
    return Compiled(spec.name, spec.role, time.perf_counter() - started, figures)


def _components(generation: Generation, spec: ProgramSpec) -> list[str]:
    return [name for name in spec.inputs if name in generation.components]


def compile_programs(
    generation: Generation, target: TargetSpec, names: Collection[str], report: Callable[[str], None]
) -> dict[str, Compiled]:
    """Compiles the programs of a generation, until one does not fit.

    Args:
        generation: the generation.
        target: the target.
        names: names of the programs to compile; empty for all.
        report: gets one line per program.

    Returns:
        The compiled programs by name, those of layers that stream as the whole ones; the last one is too
        large, or all are there.
    """
    done: dict[str, Compiled] = {}
    before = next(call for call in generation.calls if ROLES[call.role].when == "expert")
    layers = {name for form in FORMS.values() if form.streams for name in form.roles}
    for spec in programs(generation, target):
        streamed = spec.role in layers
        whole = before if ROLES[spec.role].when == "expert" else generation.loop
        name = whole.name if streamed else spec.name
        if names and name not in names:
            continue
        one = compile_program(generation, spec, target)
        report(f"{spec.name} compiled in {one.seconds:.1f} s, {one.figures.total / 1e9:.1f} GB")
        if streamed:
            one = Compiled(name, whole.role, one.seconds, _beside_layers(spec, one.figures))
        done[name] = one if name not in done else _together(done[name], one)
        if one.figures.refused or one.figures.total > usable(target.memory_bytes):
            break
    return done


def _beside_layers(spec: ProgramSpec, figures: Figures) -> Figures:
    """Returns a streamed program's figures with all that lies beside weights, keys and values as temporaries.

    Tokens go from layer to layer, so they are arguments here and temporaries in a whole step.
    """
    others = _nbytes(spec, set(spec.inputs) - {*WEIGHTS, "kv"})
    temporaries = figures.temporaries + figures.outputs + others
    return replace(figures, arguments=figures.arguments - others, outputs=0, temporaries=temporaries)


def _nbytes(spec: ProgramSpec, names: Collection[str]) -> int:
    """Returns the bytes of those arguments of a program for one device that have these names."""
    return tree_bytes([tree for name, tree in zip(spec.inputs, spec.arguments, strict=True) if name in names])


def _together(one: Compiled, other: Compiled) -> Compiled:
    """Returns two programs, of which one runs at a time, as one."""
    a, b = one.figures, other.figures
    figures = Figures(
        max(a.arguments, b.arguments),
        max(a.outputs, b.outputs),
        max(a.temporaries, b.temporaries),
        a.code + b.code,
        a.refused or b.refused,
    )
    return Compiled(one.name, one.role, one.seconds + other.seconds, figures)
