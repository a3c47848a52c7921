"""Exports a profile's programs and compiles them into the artifact's compilation cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.options import BuildOptions, Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.targets import TargetSpec, resolve_target
from wanbuild.staging import build_lock, remove_unlisted
from wanbuild.variants import family_named
from wanrun import __version__
from wanrun.artifact.jax_process import JaxFlags, using_cache
from wanrun.artifact.manifest import Executable, Manifest, Profile, Program, Target, read_manifest
from wanrun.errors import UsageError
from wanrun.files import file_sha256, fsync_directory, replace_file, sha256_of
from wanrun.loading.executables import read_program
from wanrun.loading.jax_cache import lower

if TYPE_CHECKING:
    import jax.stages


@dataclass(frozen=True)
class CompileRequest:
    """Which profiles to build for which targets.

    Args:
        artifact: the artifact's folder.
        targets: target names.
        sizes: (width, height) in pixels; the variant's first published one where there are none.
        frames: frame counts; the variant's published one where there are none.
        guidance: with guidance, without, or both; as the variant is published where there is neither.
        num_videos: videos per prompt.
        num_references: reference images of a VACE model.
        options: build options; the attention implementation comes from the target.
    """

    artifact: Path
    targets: Sequence[str] = ("local",)
    sizes: Sequence[tuple[int, int]] = ()
    frames: Sequence[int] = ()
    guidance: Sequence[bool] = ()
    num_videos: int = 1
    num_references: int = 0
    options: BuildOptions = field(default_factory=BuildOptions)

    def shapes(self, variant: object) -> Iterator[Shape]:
        """Every combination of size, frame count and guidance, for an artifact of this variant."""
        family = family_named(variant, self.artifact)
        for width, height in self.sizes or family.sizes[:1]:
            for frames in self.frames or (family.num_frames,):
                for guidance in self.guidance or (family.guidance_scale > 1,):
                    yield Shape(width, height, frames, self.num_videos, guidance, self.num_references)


def export_program(spec: ProgramSpec, platform: str) -> bytes:
    """Serializes a program as portable StableHLO, for one platform.

    Without source locations: they hold the paths and line numbers of this toolchain, so that the same
    program would have another digest wherever it is installed.
    """
    import jax
    from jax import export

    with _jax_options(jax_traceback_in_locations_limit=0):
        exported = export.export(jax.jit(spec.function), platforms=[platform])(*spec.arguments)
        return bytes(exported.serialize())


@contextlib.contextmanager
def _jax_options(**options: Any) -> Iterator[None]:
    """Sets JAX options that are not a part of the cache's key, and sets them back."""
    import jax

    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _describe(spec: ProgramSpec) -> dict[str, Any]:
    """Inputs and outputs as text; a component's weights are in the manifest already."""
    import jax

    def text(tree: Any) -> Any:
        return jax.tree.map(lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]", tree)

    arguments = zip(spec.inputs, spec.arguments, strict=True)
    weights = ("transformer", "transformer_2", "text_encoder", "vae", "image_encoder")
    return {
        "inputs": {name: text(tree) for name, tree in arguments if name not in weights},
        "outputs": text(spec.outputs),
    }


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program's cache entry and what the compiler says of it."""

    executable: Executable
    statistics: dict[str, Any]


class _Compiler:
    """Compiles programs for one target, moving each cache entry into the artifact.

    Args:
        artifact: the artifact's folder.
        target: what to compile for.
        folder: the folder of entries in it.
        kept: entries in that folder that stay as they are, by file name.
    """

    def __init__(
        self, artifact: Path, target: TargetSpec, folder: str, kept: Mapping[str, CompiledProgram]
    ) -> None:
        self._artifact, self.target, self.folder, self._kept = artifact, target, folder, kept

    def compile(self, name: str, data: bytes, donate: Sequence[int]) -> CompiledProgram:
        """Compiles one exported program.

        Raises:
            UsageError: if the program does not fit the device's memory.
        """
        final = self._artifact / self.folder
        final.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=final.parent) as folder:
            cache = Path(folder)
            started = time.perf_counter()
            # A cache entry that cannot be written is only a warning to JAX, and its first part stays.
            options = _jax_options(jax_raise_persistent_cache_errors=True, jax_traceback_in_locations_limit=0)
            with using_cache(cache), options:
                compiled = lower(data, name, donate, self.target.device).compile()
            seconds = time.perf_counter() - started
            statistics = self._statistics(name, compiled, seconds)
            (entry,) = (path for path in cache.iterdir() if path.name.endswith("-cache"))
            if entry.name in self._kept:  # another spelling of a program that is already there
                return self._kept[entry.name]
            with entry.open("rb+") as file:
                os.fsync(file.fileno())
            placed = final / entry.name
            entry.replace(placed)
        fsync_directory(final)
        fsync_directory(final.parent)
        record = Executable(placed.name, placed.stat().st_size, file_sha256(placed))
        return CompiledProgram(record, statistics)

    def _statistics(self, name: str, compiled: jax.stages.Compiled, seconds: float) -> dict[str, Any]:
        memory: Any = compiled.memory_analysis()
        cost = compiled.cost_analysis() or {}
        used = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )
        if used > self.target.memory_bytes:
            raise UsageError(
                f"{name} does not fit the memory of target {self.target.name}",
                expected=f"at most {self.target.memory_bytes / 1e9:.2f} GB",
                found=f"{used / 1e9:.2f} GB, {(used - self.target.memory_bytes) / 1e9:.2f} GB too much",
                remedy="build a smaller size, fewer frames or fewer videos",
            )
        return {
            "compile_seconds": round(seconds, 3),
            "flops": cost.get("flops", 0.0),
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
        }


def _export_profile(
    artifact: Path, manifest: Manifest, shape: Shape, options: BuildOptions, target: TargetSpec
) -> Profile:
    """Exports every program of a profile to files named by their content."""
    programs: dict[str, Program] = {}
    profile = _profile_of(manifest, shape, options)
    old = manifest.profiles.get(profile.name)
    # Other platforms' programs stay only if they were built with the same options.
    others = old.programs if old is not None and old.options == profile.options else {}
    folder = artifact / "programs" / profile.name
    folder.mkdir(parents=True, exist_ok=True)
    for spec in ProgramBuilder(manifest, shape, options, target.kernels).programs():
        data = export_program(spec, target.platform)
        digest = sha256_of(data)
        file = folder / f"{spec.name}-{digest[:12]}.stablehlo"
        if not (file.is_file() and file_sha256(file) == digest):  # a killed build leaves the old one whole
            replace_file(file, data)
        programs[spec.name] = Program(
            file.relative_to(artifact).as_posix(),
            digest,
            spec.inputs,
            spec.donate_argnums,
            target.kernels.weight_bits,
            _describe(spec),
        )
    fsync_directory(folder)
    fsync_directory(folder.parent)
    return dataclasses.replace(profile, programs={**others, target.platform: programs})


def _profile_of(manifest: Manifest, shape: Shape, options: BuildOptions) -> Profile:
    """The profile of a shape, without programs."""
    weights = {
        option: manifest.dtypes[name]["weights"]
        for option, name in (
            ("weights_dtype", "transformer"),
            ("text_weights_dtype", "text_encoder"),
            ("image_weights_dtype", "image_encoder"),
            ("vae_weights_dtype", "vae"),
        )
        if name in manifest.dtypes
    }
    return Profile(
        width=shape.width,
        height=shape.height,
        num_frames=shape.num_frames,
        num_videos=shape.num_videos,
        guidance=shape.guidance,
        index=0,
        options={**options.as_json(), **weights},
        programs={},
        num_references=shape.num_references,
    )


def _intact(artifact: Path, folder: str, entry: Executable) -> bool:
    path = artifact / folder / entry.file
    return path.is_file() and path.stat().st_size == entry.nbytes and file_sha256(path) == entry.sha256


def compile_artifact(request: CompileRequest, report: Callable[[str], None]) -> Manifest:
    """Adds profiles and targets to an artifact; never executes a program.

    Executables that are there, intact and built in this environment are kept. A target whose environment
    has changed is compiled again for all of its profiles.

    Args:
        request: what to build.
        report: told one line per program.

    Returns:
        The artifact's new manifest.

    Raises:
        ArtifactError: if there is no usable artifact.
        UsageError: for a shape or target that cannot be built.
    """
    artifact = request.artifact.resolve()
    read_manifest(artifact)
    with build_lock(artifact), JaxFlags("cpu"):
        manifest = read_manifest(artifact)
        targets = [resolve_target(name) for name in dict.fromkeys(request.targets)]
        targets = list({target.name: target for target in targets}.values())
        shapes = list(request.shapes(manifest.model.get("variant")))
        for shape in shapes:  # refuse a bad shape before anything is built
            ProgramBuilder(manifest, shape, request.options, targets[0].kernels)
        for target in targets:
            manifest = _build_target(artifact, manifest, target, shapes, request.options, report)
        remove_unlisted(artifact, manifest)
    return manifest


def _build_target(
    artifact: Path,
    manifest: Manifest,
    spec: TargetSpec,
    shapes: Sequence[Shape],
    options: BuildOptions,
    report: Callable[[str], None],
) -> Manifest:
    profiles = dict(manifest.profiles)
    for shape in shapes:
        profile = _export_profile(artifact, manifest, shape, options, spec)
        old = profiles.get(profile.name)
        index = old.index if old else 1 + max((p.index for p in profiles.values()), default=-1)
        profiles[profile.name] = dataclasses.replace(profile, index=index)
    wanted = [_profile_of(manifest, shape, options).name for shape in shapes]
    folder = f"executables/{spec.name}"
    built = manifest.targets.get(spec.name, Target(folder, spec.environment, {}))
    ledger: dict[tuple[str, str], CompiledProgram] = {}
    if built.environment == spec.environment:
        folder = built.folder
        ledger = _usable_entries(artifact, manifest, built)
    else:
        report(f"target {spec.name}: the environment has changed, its executables are compiled again")
        if built.folder == folder:  # the key may be the same, and a killed build leaves the old entries
            folder += "-2"
    compiler = _Compiler(artifact, spec, folder, {c.executable.file: c for c in ledger.values()})
    executables: dict[str, dict[str, Executable]] = {}
    statistics: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*built.executables, *wanted]):
        for program_name, program in profiles[name].programs[spec.platform].items():
            compiled = ledger.get((program_name, program.sha256))
            if compiled is None:
                data = read_program(artifact, program_name, program)
                compiled = compiler.compile(program_name, data, program.donate)
                # A program that profiles share has one entry: compiling it again would replace its bytes.
                ledger[program_name, program.sha256] = compiled
                report(_line(name, program_name, compiled.statistics, spec))
            elif name in wanted:
                report(f"{name}  {program_name:<15} up to date")
            executables.setdefault(name, {})[program_name] = compiled.executable
            statistics.setdefault(name, {})[program_name] = compiled.statistics
    target = Target(compiler.folder, spec.environment, executables, statistics)
    changed = manifest.changed(
        profiles=profiles,
        targets={**manifest.targets, spec.name: target},
        golden={
            name: record
            for name, record in manifest.golden.items()
            if profiles[name] == manifest.profiles.get(name)
        },
        tool={"name": "wanbuild", "version": __version__},
        times={**manifest.times, f"compiled {spec.name}": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    )
    changed.write(artifact)
    return changed


def _usable_entries(
    artifact: Path, manifest: Manifest, built: Target
) -> dict[tuple[str, str], CompiledProgram]:
    """What is compiled and undamaged, by program name and the digest of its StableHLO."""
    usable: dict[tuple[str, str], CompiledProgram] = {}
    for name, entries in built.executables.items():
        programs = manifest.profiles[name].programs[built.environment["platform"]]
        for program_name, entry in entries.items():
            if _intact(artifact, built.folder, entry):
                key = program_name, programs[program_name].sha256
                usable[key] = CompiledProgram(entry, built.statistics[name][program_name])
    return usable


def _line(profile: str, program: str, statistics: dict[str, Any], target: TargetSpec) -> str:
    gigabytes = (statistics["argument_bytes"] + statistics["temporary_bytes"]) / 1e9
    return (
        f"{profile}  {program:<15} compiled in {statistics['compile_seconds']:.1f} s, "
        f"{statistics['flops'] / 1e9:.1f} GFLOP, arguments + temporaries {gigabytes:.3f} GB "
        f"of {target.memory_bytes / 1e9:.1f} GB"
    )
