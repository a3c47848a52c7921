"""Exports and compiles an artifact's profiles again, from what the manifest says they were built with.

For programs that are damaged, or that JAX does not read any more because they are too old. Weights stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.compile import build_target
from wanbuild.programs.export import used_sets
from wanbuild.programs.options import BuildOptions, Shape
from wanbuild.programs.requirements import with_requirements, write_requirements
from wanbuild.programs.targets import TargetSpec, resolve_target
from wanbuild.staging import build_lock, remove_unlisted
from wanrun.artifact.environment import device_mismatches, host_mismatches, open_devices
from wanrun.artifact.jax_process import JaxFlags
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import digest_found

Report = Callable[[str], None]


def refresh_artifact(artifact: Path, report: Report) -> Manifest:
    """Builds all profiles of all targets again that this machine can build, as they were built.

    The profiles' options are those of the manifest. Packages are those that are installed here. A target that
    cannot be built here is kept, unless its programs are damaged or gone. Each target is committed when it is
    done, so a refresh that is killed leaves an artifact as usable as it was.

    Args:
        artifact: the artifact's folder.
        report: told one line per program, and one of a target that is not built.

    Returns:
        The artifact's new manifest.

    Raises:
        ArtifactError: if there is no artifact, or no target of it can be built here.
    """
    artifact = artifact.resolve()
    read_manifest(artifact)
    with build_lock(artifact), JaxFlags("cpu"):
        manifest = read_manifest(artifact)
        specs = _buildable(artifact, manifest, report)
        for name, spec in specs.items():  # refuse what cannot be built before anything is
            for profile in _profiles(manifest, name):
                shape, options = Shape.of(profile), BuildOptions.of(profile.options)
                ProgramBuilder(manifest, shape, options, spec.kernels)
        for name, spec in specs.items():
            before = manifest
            manifest = build_target(artifact, manifest, spec, _profiles(manifest, name), report)
            if manifest.content_digest == before.content_digest:
                report(f"target {name}: this JAX exports what was there; a newer one's programs last longer")
        manifest = _without_dead(artifact, manifest, specs, report)
        remove_unlisted(artifact, manifest)
    return manifest


def _profiles(manifest: Manifest, target: str) -> list[Profile]:
    """What a target has executables of, in the order of building."""
    profiles = [manifest.profiles[name] for name in manifest.targets[target].executables]
    return sorted(profiles, key=lambda profile: profile.index)


def _buildable(artifact: Path, manifest: Manifest, report: Report) -> dict[str, TargetSpec]:
    """The targets that this machine can build, by name; the others are reported.

    Raises:
        ArtifactError: if there are none.
    """
    specs: dict[str, TargetSpec] = {}
    reasons: list[str] = []
    for name, target in manifest.targets.items():
        try:
            specs[name] = _like_here(artifact, name, target)
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


def _like_here(artifact: Path, name: str, target: Target) -> TargetSpec:
    """A target as it would be built here: for the same machine, with the packages that are installed.

    Raises:
        UsageError: if this machine is of another kind.
    """
    spec = resolve_target(name)
    packages = ("packages", "zstandard", "platform_version")
    built = {**target.environment, **{fact: spec.environment[fact] for fact in packages}}
    differs = host_mismatches(built, artifact / target.requirements.file)
    differs += device_mismatches(built, open_devices(spec.platform))
    if differs:
        raise UsageError("this machine is of another kind", found="; ".join(map(str, differs)))
    return spec


def _without_dead(
    artifact: Path, manifest: Manifest, built: Mapping[str, TargetSpec], report: Report
) -> Manifest:
    """The manifest without targets that were not built and cannot run: committed if any is left out."""
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
    """Whether every program that a target has an executable of is whole; False where it has none."""
    programs = [
        program
        for name in target.executables
        for program in manifest.programs(target, manifest.profiles[name]).values()
    ]
    return bool(programs) and all(digest_found(artifact / one.file) == one.sha256 for one in programs)
