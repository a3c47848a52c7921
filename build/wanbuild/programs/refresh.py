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
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.mesh import Sizes
from wanrun.artifact.named import PROGRAM
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.machine.environment import built_elsewhere, device_mismatches, host_mismatches

Report = Callable[[str], None]


def refresh_artifact(folder: Path, report: Report) -> Manifest:
    """Builds all profiles again, for every target that this machine can build.

    The options are those of the manifest, and the packages are those that are installed here. A target that
    cannot be built here is kept, unless its programs are damaged or gone. Each target is committed as soon as
    it is built, so a refresh that is killed leaves the artifact as usable as before.

    Args:
        folder: the artifact's folder.
        report: gets one line per program, and one per target that is not built.

    Returns:
        The artifact's new manifest.

    Raises:
        ArtifactError: if there is no artifact, or if none of its targets can be built here.
    """
    with changing(folder.resolve()) as artifact, pinned(platforms_of(artifact.manifest.targets)):
        manifest = artifact.manifest
        specs = _buildable(artifact, report)
        for name, spec in specs.items():  # refuse an impossible profile before any is built
            for profile in _profiles(manifest, name):
                shape, options = Shape.of(profile), BuildOptions.of(profile.options)
                ProgramBuilder(manifest, shape, options, *spec.reopened().programs_for)
        for name, spec in specs.items():
            before = artifact.manifest
            artifact = build_target(artifact, spec.reopened(), _profiles(before, name), report)
            if artifact.manifest.content_digest == before.content_digest:
                report(f"target {name}: this JAX exports what was there; a newer one's programs last longer")
        return _without_dead(artifact, specs, report).manifest


def _profiles(manifest: Manifest, target: str) -> list[Profile]:
    """Returns the profiles that a target has executables of, in the order of building."""
    profiles = [manifest.profiles[name] for name in manifest.targets[target].executables]
    return sorted(profiles, key=lambda profile: profile.index)


def _buildable(artifact: Artifact, report: Report) -> dict[str, TargetSpec]:
    """Returns the targets that this machine can build, by name, and reports the others.

    Raises:
        ArtifactError: if this machine can build none.
    """
    specs: dict[str, TargetSpec] = {}
    reasons: list[str] = []
    for name, target in artifact.manifest.targets.items():
        mesh = artifact.manifest.program_sets[target.program_set].mesh
        try:
            specs[name] = _like_here(artifact.folder, name, target, mesh)
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


def _like_here(folder: Path, name: str, target: Target, mesh: Sizes) -> TargetSpec:
    """Returns a target's specification for a build here: the same machine, with the installed packages.

    Raises:
        UsageError: if this machine is of another kind.
    """
    spec = resolve_target(name.removesuffix(name_suffix(mesh)), mesh)
    if built_elsewhere(target.environment):  # every machine that has its compiler can build it
        return spec
    packages = ("packages", "zstandard", "platform_version")
    built = {**target.environment, **{fact: spec.environment[fact] for fact in packages}}
    differs = host_mismatches(built, folder / target.requirements.file)
    differs += device_mismatches(built, list(spec.devices))
    if differs:
        raise UsageError("this machine is of another kind", found="; ".join(map(str, differs)))
    return spec


def _without_dead(artifact: Artifact, built: Mapping[str, TargetSpec], report: Report) -> Artifact:
    """Removes targets that were not built and have lost their programs; commits if there are any."""
    manifest = artifact.manifest
    dead = {name for name in manifest.targets if name not in built and not _has_programs(artifact, name)}
    if not dead:
        return artifact
    for name in sorted(dead):
        report(f"target {name}: left out, its programs are gone; build it again with wanbuild compile")
    targets = with_requirements({name: one for name, one in manifest.targets.items() if name not in dead})
    changed = artifact.changed(targets=targets, program_sets=used_sets(manifest.program_sets, targets))
    write_requirements(artifact.folder, targets)
    changed.write()
    return changed


def _has_programs(artifact: Artifact, name: str) -> bool:
    """Returns whether every program of a target's executables is whole; False for a target without any."""
    target = artifact.manifest.targets[name]
    own = artifact.only(targets=[name], profiles=target.executables.keys())
    programs = [one for one in own.named() if one.kind is PROGRAM]
    return bool(programs) and own.whole(programs)
