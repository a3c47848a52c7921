"""Compiles the programs of a generation from their shapes alone, and takes the compiler's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from wanbuild.plan.generation import Generation
from wanbuild.plan.memory import Figures, usable
from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.compiler import compiled_for
from wanbuild.programs.export import export_program
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.too_large import TooLargeError
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.programs import FORMS, Role


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
    role: Role
    seconds: float
    figures: Figures


def programs(generation: Generation, target: TargetSpec) -> Iterator[ProgramSpec]:
    """Yields the programs for a target; the loop first, as it is most likely to be too large."""
    builder = ProgramBuilder(generation.manifest, generation.shape, generation.options, *target.programs_for)
    yield from sorted(generation.specs(builder), key=lambda spec: spec.role not in FORMS.values())


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
        The compiled programs by name; the last one is too large, or all are there.
    """
    done: dict[str, Compiled] = {}
    for spec in programs(generation, target):
        if names and spec.name not in names:
            continue
        one = done[spec.name] = compile_program(generation, spec, target)
        report(f"{spec.name} compiled in {one.seconds:.1f} s, {one.figures.total / 1e9:.1f} GB")
        if one.figures.refused or one.figures.total > usable(target.memory_bytes):
            break
    return done
