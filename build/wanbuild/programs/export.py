"""Exports a profile's programs as StableHLO, into the program set of a target's platform and kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from wanbuild.build_options import BuildOptions
from wanbuild.models.partition import PARAMETERS
from wanbuild.programs.jax_flags import jax_options
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.wiring import aval_text
from wanbuild.targets.target import TargetSpec
from wanbuild.variants.from_video import with_start
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Model
from wanrun.artifact.named import PROGRAM
from wanrun.artifact.programs import PlainFile, Profile, Program, ProgramSet
from wanrun.artifact.roles import FORMS
from wanrun.artifact.targets import Target
from wanrun.errors import UsageError, field
from wanrun.files import digest_found, fsync_directory, replace_file, sha256_of

CUSTOM_CALLS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cuda": ("__cudnn$fmhaSoftmax",)})
"""Calls of a platform's libraries that programs may have, though ``jax.export`` promises nothing of them."""


def export_program(spec: ProgramSpec, platform: str) -> bytes:
    """Serializes a program as portable StableHLO, for one platform.

    Without source locations: they hold the paths and line numbers of this toolchain, so that the same
    program would have another digest wherever it is installed. It takes its inputs by name, so that a runtime
    can tell which is which: two scalars look alike otherwise.
    """
    import jax
    from jax import export

    def by_name(**inputs: Any) -> dict[str, Any]:
        return spec.function(*(inputs[name] for name in spec.inputs))

    by_name.__name__ = by_name.__qualname__ = spec.name
    arguments = dict(zip(spec.inputs, spec.arguments, strict=True))
    placed: dict[str, Any] = {}
    if spec.mesh is not None:
        placed["out_shardings"] = jax.tree.map(lambda leaf: leaf.sharding, spec.outputs)
        # JAX forgets the sharding of an argument that is not read, and a runtime would have to pass it whole.
        placed["keep_unused"] = True
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS.get(platform, ())]
    with jax_options(jax_traceback_in_locations_limit=0), spec.tracing():
        exporting = export.export(jax.jit(by_name, **placed), platforms=[platform], disabled_checks=allowed)
        return bytes(exporting(**arguments).serialize())


def describe(spec: ProgramSpec, components: Collection[str]) -> dict[str, Any]:
    """Returns inputs and outputs as text, without components: the manifest lists their weights already."""
    import jax

    def text(tree: Any) -> Any:
        return jax.tree.map(lambda a: aval_text(str(a.dtype), *a.shape), tree)

    arguments = zip(spec.inputs, spec.arguments, strict=True)
    return {
        "inputs": {name: text(tree) for name, tree in arguments if name not in components},
        "outputs": text(spec.outputs),
    }


def profile_of(manifest: Manifest, shape: Shape, options: BuildOptions) -> Profile:
    """Returns the profile of a shape; its index, 0, is replaced when it is added to a manifest."""
    return Profile(
        width=shape.width,
        height=shape.height,
        num_frames=shape.num_frames,
        num_videos=shape.num_videos,
        guidance=shape.guidance,
        index=0,
        options=in_form_of(manifest.model, options).recorded(manifest.dtypes),
        num_references=shape.num_references,
    )


def in_form_of(model: Model, options: BuildOptions) -> BuildOptions:
    """Returns options with the forms of the loop that a model has: a chunked model only has its form.

    Raises UsageError for a form that the model does not have.
    """
    (form,) = (form.name for form in FORMS.values() if form.chunked)
    several = options.loop in ("both", "all")
    if model.chunks is not None and several:
        return msgspec.structs.replace(options, loop=form)
    if several or (options.loop == form) == (model.chunks is not None):
        return options
    raise UsageError(
        "unsupported",
        f"{field('loop')} cannot be built for {model.variant}",
        expected="another one: it makes a video at once" if model.chunks is None else f"{form}",
        found=options.loop,
    )


def with_programs(artifact: Artifact, target: TargetSpec, wanted: Sequence[Profile]) -> tuple[Artifact, str]:
    """Exports profiles into the program set of a target; returns the artifact with them, and the set's key.

    If the target needs another set now, because the kernels or JAX have changed, all its profiles are
    exported. Programs of other sets stay if they were built with the same options. Executables and golden
    records of programs that have changed are left out.

    Raises UsageError for a shape that cannot be built, or parts of a model that do not fit together.
    """
    import jax

    manifest = artifact.manifest
    profiles = _indexed(manifest.profiles, wanted)
    facts: dict[str, Any] = {"platform": target.platform, "kernels": target.kernels, "jax": jax.__version__}
    rules = {axis: tuple(along) for axis, along in PARAMETERS.items()} if target.mesh else {}
    empty = ProgramSet(**facts, mesh=target.mesh, programs={}, rules=rules)
    sets = {key: _of_these(old, manifest.profiles, profiles) for key, old in manifest.program_sets.items()}
    own = sets.get(empty.key, empty)
    programs = dict(own.programs)
    built = manifest.targets[target.name].executables if target.name in manifest.targets else {}
    names = dict.fromkeys([*(p.name for p in wanted), *(name for name in built if name not in programs)])
    builders = {name: builder_of(manifest, profiles[name], target) for name in names}
    for name, builder in builders.items():  # a shape that cannot be is refused before anything is built
        programs[name] = _export_profile(artifact, name, builder, target.platform)
    streams = (name for name in names if any(FORMS[form].streams for form in profiles[name].options.forms))
    layers = next((layer_stacks(builders[name]) for name in streams), own.layers)
    sets[empty.key] = msgspec.structs.replace(own, programs=programs, layers=layers)
    changed = _changed_programs(manifest.program_sets, sets)
    targets = {
        name: _without(old, {profile for key, profile in changed if key == old.program_set})
        for name, old in manifest.targets.items()
    }
    lost = {profile for _, profile in changed}
    golden = {name: record for name, record in manifest.golden.items() if name not in lost}
    return (
        artifact.changed(
            **with_start(manifest, any(one.options.video_to_video for one in profiles.values())),
            profiles=profiles,
            program_sets=sets,
            targets=targets,
            golden=golden,
        ),
        empty.key,
    )


def layer_stacks(builder: ProgramBuilder) -> dict[str, tuple[int, ...]]:
    """Returns the stacks of a transformer, each with the layers of the first one that its own follow."""
    return {name: tuple(follows) for name, follows in builder.modules["transformer"].stacks.items()}


def used_sets(program_sets: Mapping[str, ProgramSet], targets: Mapping[str, Target]) -> dict[str, ProgramSet]:
    """Returns the program sets that targets refer to."""
    used = {target.program_set for target in targets.values()}
    return {key: programs for key, programs in program_sets.items() if key in used}


def builder_of(manifest: Manifest, profile: Profile, target: TargetSpec) -> ProgramBuilder:
    shape, options = Shape.of(profile), BuildOptions.of(profile.options)
    return ProgramBuilder(manifest, shape, options, *target.programs_for)


def _export_profile(
    artifact: Artifact, name: str, builder: ProgramBuilder, platform: str
) -> dict[str, Program]:
    """Exports every program of a profile to a file whose name has the digest of its content."""
    programs: dict[str, Program] = {}
    folder, specs = artifact.folder / PROGRAM.folder / name, builder.programs()
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        written, plain = _written(artifact, folder / spec.name, export_program(spec, platform)), None
        if spec.plain is not None:
            data = export_program(dataclasses.replace(spec, function=spec.plain), platform)
            plain = PlainFile(**_written(artifact, folder / f"{spec.name}_plain", data))
        programs[spec.name] = Program(
            **written,
            inputs=spec.inputs,
            donate=spec.donate_argnums,
            avals=describe(spec, artifact.manifest.components),
            role=spec.role,
            place=spec.place,
            plain=plain,
        )
    fsync_directory(folder)
    fsync_directory(folder.parent)
    return programs


def _written(artifact: Artifact, path: Path, data: bytes) -> dict[str, str]:
    """Writes a program to a file that is named by a path and the digest; returns the fields of its record."""
    digest = sha256_of(data)
    file = path.with_name(f"{path.name}-{digest[:12]}.stablehlo")
    if digest_found(file, len(data)) != digest:  # a killed build leaves the old one whole
        replace_file(file, data)
    return {"file": file.relative_to(artifact.folder).as_posix(), "sha256": digest}


def _indexed(old: Mapping[str, Profile], wanted: Sequence[Profile]) -> dict[str, Profile]:
    """Returns the old and the wanted profiles; indices follow the order in which they were first built."""
    profiles = dict(old)
    for profile in wanted:
        following = 1 + max((other.index for other in profiles.values()), default=-1)
        index = profiles[profile.name].index if profile.name in profiles else following
        profiles[profile.name] = msgspec.structs.replace(profile, index=index)
    return profiles


def _of_these(programs: ProgramSet, old: Mapping[str, Profile], new: Mapping[str, Profile]) -> ProgramSet:
    """Returns the program set with only the profiles whose options are the same as before."""
    names = [name for name in programs.programs if old[name].options == new[name].options]
    kept = {name: programs.programs[name] for name in names}
    return msgspec.structs.replace(programs, programs=kept, exported={})


def _changed_programs(old: Mapping[str, ProgramSet], new: Mapping[str, ProgramSet]) -> set[tuple[str, str]]:
    """Returns set key and profile of the programs that were removed or changed."""
    return {
        (key, name)
        for key, programs in old.items()
        for name, entry in programs.programs.items()
        if new[key].programs.get(name) != entry
    }


def _without(target: Target, profiles: Collection[str]) -> Target:
    """Returns a target without the executables of these profiles."""
    return msgspec.structs.replace(
        target,
        executables={name: entry for name, entry in target.executables.items() if name not in profiles},
        statistics={name: entry for name, entry in target.statistics.items() if name not in profiles},
    )
