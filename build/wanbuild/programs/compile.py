"""Compiles the requested shapes' programs for a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from wanbuild.build_options import CompileRequest
from wanbuild.models.attention_forms import has_kernel
from wanbuild.programs.entry_compiler import CompiledProgram, EntryCompiler
from wanbuild.programs.export import builder_of, profile_of
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.limited import LimitedProcesses
from wanbuild.programs.requirements import requirements_of, write_requirements
from wanbuild.programs.shape import Shape
from wanbuild.programs.xla import TooLargeError
from wanbuild.targets.target import MOSAIC, TargetSpec, platforms_of, resolve_target
from wanbuild.variants.table import variant_named
from wanrun.artifact.artifact import Artifact, named_executable
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.named import EXECUTABLE
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Executable, Target
from wanrun.machine.environment import built_elsewhere
from wanrun.machine.rates import LONG
from wanrun.request.profiles import has_guidance
from wanrun.terminal.status import Status
from wanrun.timing.spans import Spans
from wanrun.units import in_bytes, in_hours, scaled


def shapes(request: CompileRequest, manifest: Manifest) -> Iterator[Shape]:
    """Yields every requested combination of size, frame count and guidance."""
    variant = variant_named(manifest.model.variant, request.artifact)
    for width, height in request.sizes or variant.sizes[:1]:
        for frames in request.frames or (variant.num_frames,):
            for guidance in request.guidance or (has_guidance(manifest),):
                yield Shape(width, height, frames, request.num_videos, guidance, request.num_references)


def check_request(request: CompileRequest, manifest: Manifest) -> None:
    """Checks that shapes and targets can be built; builds nothing. Raises UsageError if they cannot.

    ``manifest`` is the artifact's, or one without files of the same model.
    """
    with pinned(platforms_of(request.targets)):
        targets = requested_targets(request, manifest)
        for shape in dict.fromkeys(shapes(request, manifest)):
            for target in targets:
                builder_of(manifest, profile_of(manifest, shape, request.options), target)


def requested_targets(request: CompileRequest, manifest: Manifest) -> list[TargetSpec]:
    """Returns the requested targets, with the requested form of attention or the one they have now."""
    targets = [resolve_target(name, request.mesh) for name in dict.fromkeys(request.targets)]
    if request.attention is None:
        return [as_recorded(target, manifest) for target in targets]
    return [target.attending_by(request.attention) for target in targets]


def as_recorded(target: TargetSpec, manifest: Manifest) -> TargetSpec:
    """Returns a target with the form of attention that the artifact was built with, if it still exists.

    A target that the artifact lacks keeps its form, or gets that in Mosaic GPU if its GPU is not here and the
    model's heads are of the kernel's size: cuDNN's is compiled only on the GPU.
    """
    if (built := manifest.targets.get(target.name)) is None:
        kernels = target.attentions.get(MOSAIC, target.kernels)
        suits = has_kernel(kernels, manifest.configs["transformer"]["attention_head_dim"])
        return replace(target, kernels=kernels) if suits and built_elsewhere(target.environment) else target
    form = manifest.program_sets[built.program_set].kernels.attention
    named = (name for name, kernels in target.attentions.items() if kernels.attention == form)
    return target.attending_by(next(named, target.kernels.attention))


def write_built(artifact: Artifact) -> None:
    """Commits what was built: the manifest, and before it the requirements files that it lists."""
    write_requirements(artifact.folder, artifact.manifest.targets)
    artifact.write()


def compile_target(
    artifact: Artifact,
    before: Artifact,
    spec: TargetSpec,
    key: str,
    wanted: Sequence[str],
    processes: LimitedProcesses,
    report: Callable[[str], None],
) -> Target:
    """Compiles the programs without a usable executable for a target, its other profiles' too."""
    folder = f"{EXECUTABLE.folder}/{spec.name}"
    built = before.manifest.targets.get(spec.name)
    ledger: dict[tuple[str, str], CompiledProgram] = {}
    if built is not None and _compiled_alike(built, spec):
        folder = built.folder
        ledger = _usable_entries(before, built)
    elif built is not None:
        report(f"target {spec.name}: the environment has changed, its executables are compiled again")
        if built.folder == folder:  # keys may be the same, and a killed build must leave the old entries
            folder += "-2"
    executables: dict[str, dict[str, Executable]] = {}
    statistics: dict[str, dict[str, Mapping[str, Any]]] = {}
    spans = Spans()
    with Status(lambda: spans.running) as status:
        report = status.paused()(report)
        compiler = EntryCompiler(artifact, spec, folder, ledger, processes, report, spans)
        profiles = dict.fromkeys([*(built.executables if built else ()), *wanted])
        programs = artifact.manifest.program_sets[key].programs
        _announce([programs[name] for name in profiles], compiler, before.manifest, report)
        for name in profiles:
            for program_name, program in programs[name].items():
                compiled = compiler.usable(program_name, program)
                if compiled is None:
                    with _of_profile(artifact.manifest.profiles[name]):
                        compiled = compiler.add(
                            program_name, program, _last_time(before.manifest, program_name)
                        )
                    report(_line(name, program_name, compiled, spec))
                elif name in wanted:
                    report(f"{name}  {program_name:<15} up to date")
                if compiled.executable is not None:
                    executables.setdefault(name, {})[program_name] = compiled.executable
                statistics.setdefault(name, {})[program_name] = compiled.statistics
    return Target(
        program_set=key,
        folder=folder,
        environment=spec.environment,
        requirements=requirements_of(spec.environment),
        options=spec.options,
        program_options=spec.program_options,
        executables=executables,
        statistics=statistics,
    )


@contextmanager
def _of_profile(profile: Profile) -> Iterator[None]:
    """Adds the profile to the error of a program that is too large."""
    try:
        yield
    except TooLargeError as error:
        error.profile = profile
        raise


def _announce(
    profiles: Sequence[Mapping[str, Any]],
    compiler: EntryCompiler,
    before: Manifest,
    report: Callable[[str], None],
) -> None:
    """Reports how long the programs will take to compile, if that is long and known."""
    missing = {
        (name, program.sha256): _last_seconds(before, name)
        for programs in profiles
        for name, program in programs.items()
        if compiler.usable(name, program) is None
    }
    if (expected := sum(seconds or 0.0 for seconds in missing.values())) >= LONG:
        report(f"compiling takes about {in_hours(expected)}, if the programs take what they took before")


def _last_seconds(manifest: Manifest, program: str) -> float | None:
    """Returns how long a program took to compile, for any target and profile; None if that is not known."""
    known = [
        figures[program]["compile_seconds"]
        for target in manifest.targets.values()
        for figures in target.statistics.values()
        if program in figures
    ]
    return float(known[-1]) if known else None


def _last_time(manifest: Manifest, program: str) -> str:
    """Returns the same in words; empty if it is not known."""
    seconds = _last_seconds(manifest, program)
    return "" if seconds is None else f" ({seconds:.0f} s the last time)"


def _compiled_alike(built: Target, spec: TargetSpec) -> bool:
    """Whether a target's executables were compiled in this environment and with these options."""
    return all(
        getattr(built, name) == getattr(spec, name) for name in ("environment", "options", "program_options")
    )


def _usable_entries(artifact: Artifact, built: Target) -> dict[tuple[str, str], CompiledProgram]:
    """Returns the undamaged executables by program name and the digest of their StableHLO."""
    usable: dict[tuple[str, str], CompiledProgram] = {}
    for name, entries in built.executables.items():
        programs = artifact.manifest.programs(built, artifact.manifest.profiles[name])
        for program_name, entry in entries.items():
            if artifact.whole([named_executable("", built, entry)]):
                key = program_name, programs[program_name].sha256
                usable[key] = CompiledProgram(entry, built.statistics[name][program_name])
    return usable


def _line(profile: str, program: str, compiled: CompiledProgram, target: TargetSpec) -> str:
    statistics = compiled.statistics
    left = "" if compiled.executable else "; left to the GPU, which compiles it before its first video"
    work = scaled(statistics["flops"], "FLOP") if "flops" in statistics else "FLOP unknown"
    needed = in_bytes(statistics["argument_bytes"] + statistics["temporary_bytes"])
    return (
        f"{profile}  {program:<15} compiled in {statistics['compile_seconds']:.1f} s, "
        f"{work}, arguments + temporaries {needed} of {in_bytes(target.memory_bytes)}{left}"
    )
