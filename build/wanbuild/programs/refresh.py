"""Exports and compiles an artifact's profiles again, with the build options that the manifest records.

This replaces programs that are damaged, or that JAX no longer reads because they are too old. Weights stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from wanbuild.programs.build_options import BuildOptions, Shape
from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.compile import build_target
from wanbuild.programs.export import used_sets
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.requirements import with_requirements, write_requirements
from wanbuild.staging import changing
from wanbuild.targets.mesh import name_suffix
from wanbuild.targets.target import TargetSpec, platforms_of, resolve_target
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.mesh import Sizes
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.executables.entries import MAX_PROGRAM_BYTES
from wanrun.files import digest_found
from wanrun.machine.environment import built_elsewhere, device_mismatches, host_mismatches

Report = Callable[[str], None]


def refresh_artifact(artifact: Path, report: Report) -> Manifest:
    """Builds all profiles again, for every target that this machine can build.

    The options are those of the manifest, and the packages are those that are installed here. A target that
    cannot be built here is kept, unless its programs are damaged or gone. Each target is committed as soon as
    it is built, so a refresh that is killed leaves the artifact as usable as before.

    Args:
        artifact: the artifact's folder.
        report: gets one line per program, and one per target that is not built.

    Returns:
        The artifact's new manifest.

    Raises:
        ArtifactError: if there is no artifact, or if none of its targets can be built here.
    """
    artifact = artifact.resolve()
    read_manifest(artifact)
    with changing(artifact), pinned(platforms_of(read_manifest(artifact).targets)):
        manifest = read_manifest(artifact)
        specs = _buildable(artifact, manifest, report)
        for name, spec in specs.items():  # refuse an impossible profile before any is built
            for profile in _profiles(manifest, name):
                shape, options = Shape.of(profile), BuildOptions.of(profile.options)
                ProgramBuilder(manifest, shape, options, *spec.reopened().programs_for)
        for name, spec in specs.items():
            before = manifest
            manifest = build_target(artifact, manifest, spec.reopened(), _profiles(manifest, name), report)
            if manifest.content_digest == before.content_digest:
                report(f"target {name}: this JAX exports what was there; a newer one's programs last longer")
        return _without_dead(artifact, manifest, specs, report)


def _profiles(manifest: Manifest, target: str) -> list[Profile]:
    """Returns the profiles that a target has executables of, in the order of building."""
    profiles = [manifest.profiles[name] for name in manifest.targets[target].executables]
    return sorted(profiles, key=lambda profile: profile.index)


def _buildable(artifact: Path, manifest: Manifest, report: Report) -> dict[str, TargetSpec]:
    """Returns the targets that this machine can build, by name, and reports the others.

    Raises:
        ArtifactError: if this machine can build none.
    """
    specs: dict[str, TargetSpec] = {}
    reasons: list[str] = []
    for name, target in manifest.targets.items():
        try:
            specs[name] = _like_here(artifact, name, target, manifest.program_sets[target.program_set].mesh)
        except UsageError as error:
            reasons.append(f"target {name} is left as it is: {error}")
    if not specs:
        raise ArtifactError(
            f"no target of {artifact} can be built here",
            found="; ".join(reasons) or "no targets",
            remedy="run it on a machine of that kind" if reasons else "run wanbuild compile",
        )
    for reason in reasons:
        report(reason)
    return specs


def _like_here(artifact: Path, name: str, target: Target, mesh: Sizes) -> TargetSpec:
    """Returns a target's specification for a build here: the same machine, with the installed packages.

    Raises:
        UsageError: if this machine is of another kind.
    """
    spec = resolve_target(name.removesuffix(name_suffix(mesh)), mesh)
    if built_elsewhere(target.environment):  # every machine that has its compiler can build it
        return spec
    packages = ("packages", "zstandard", "platform_version")
    built = {**target.environment, **{fact: spec.environment[fact] for fact in packages}}
    differs = host_mismatches(built, artifact / target.requirements.file)
    differs += device_mismatches(built, list(spec.devices))
    if differs:
        raise UsageError("this machine is of another kind", found="; ".join(map(str, differs)))
    return spec


def _without_dead(
    artifact: Path, manifest: Manifest, built: Mapping[str, TargetSpec], report: Report
) -> Manifest:
    """Removes targets that were not built and have lost their programs; commits if there are any."""
    dead = {
        name
        for name, target in manifest.targets.items()
        if name not in built and not _has_programs(artifact, manifest, target)
    }
    if not dead:
        return manifest
    for name in sorted(dead):
        report(f"target {name}: left out, its programs are gone; build it again with wanbuild compile")
    targets = with_requirements({name: one for name, one in manifest.targets.items() if name not in dead})
    changed = manifest.changed(targets=targets, program_sets=used_sets(manifest.program_sets, targets))
    write_requirements(artifact, targets)
    changed.write(artifact)
    return changed


def _has_programs(artifact: Path, manifest: Manifest, target: Target) -> bool:
    """Returns whether every program of a target's executables is whole; False for a target without any."""
    programs = [
        program
        for name in target.executables
        for program in manifest.programs(target, manifest.profiles[name]).values()
    ]
    return bool(programs) and all(
        digest_found(artifact / one.file, MAX_PROGRAM_BYTES) == one.sha256 for one in programs
    )
