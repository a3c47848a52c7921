"""Exports and compiles what an artifact's manifest records once more; weights are not read.

This replaces programs that are damaged, that the installed JAX does not read, or that an older release wrote
in another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from wanbuild.build import export_and_compile
from wanbuild.build_options import BuildOptions
from wanbuild.programs.compile import as_recorded, write_built
from wanbuild.programs.export import used_sets
from wanbuild.programs.jax_flags import pinned
from wanbuild.staging import changing
from wanbuild.targets.target import TargetSpec, platforms_of, resolve_target
from wanrun import open_artifact
from wanrun.artifact.manifest import Manifest, runs_here
from wanrun.artifact.mesh import Sizes, name_suffix
from wanrun.artifact.select import named_profile
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.machine.environment import built_elsewhere, device_mismatches, host_mismatches


def compile_again(folder: Path, report: Callable[[str], None]) -> Manifest:
    """Builds all profiles, as recorded, for every target that this machine can build.

    A target that this machine cannot build stays as it is, or is removed if its programs are of an older
    format, which nothing here runs. Nothing is replaced before all is built. ``report`` gets one line per
    program, and one per target that is not built.

    Returns the artifact's new manifest. Raises ArtifactError if there is no artifact, or if none of its
    targets can be built here.
    """
    with changing(folder.resolve(), again=True) as before, pinned(platforms_of(before.manifest.targets)):
        artifact, left, stay = before, dict[str, str](), runs_here(before.folder)
        for name, target in before.manifest.targets.items():
            try:
                mesh = before.manifest.program_sets[target.program_set].mesh
                spec = as_recorded(_like_here(before.folder, name, target, mesh), before.manifest)
            except UsageError as error:
                left[name] = f"target {name} {'is left as it is' if stay else 'goes'}: {error}"
                continue
            profiles = [before.manifest.profiles[profile] for profile in target.executables]
            artifact = export_and_compile(artifact, spec, profiles, report)
        if len(left) == len(before.manifest.targets) and (left or stay):
            raise ArtifactError(
                "wrong_machine" if left else "not_built",
                f"no target of {before} can be built here",
                found="; ".join(left.values()) or "no targets",
                remedy="run it on a machine of that kind" if left else "run wanbuild compile",
            )
        if not stay:
            targets = {name: one for name, one in artifact.manifest.targets.items() if name not in left}
            sets = used_sets(artifact.manifest.program_sets, targets)
            artifact = artifact.changed(targets=targets, program_sets=sets)
        write_built(artifact)
    for reason in left.values():
        report(reason)
    return artifact.manifest


def _like_here(folder: Path, name: str, target: Target, mesh: Sizes) -> TargetSpec:
    """Returns the specification of a recorded target; raises UsageError on another kind of machine."""
    spec = resolve_target(name.removesuffix(name_suffix(mesh)), mesh)
    if built_elsewhere(target.environment):  # every machine that has its compiler can build it
        return spec
    packages = ("packages", "zstandard", "platform_version")  # those that are installed here count
    built = {**target.environment, **{fact: spec.environment[fact] for fact in packages}}
    differs = host_mismatches(built, folder / target.requirements.file)
    differs += device_mismatches(built, list(spec.devices))
    if differs:
        raise UsageError(
            "wrong_machine", "this machine is of another kind", found="; ".join(map(str, differs))
        )
    return spec


def like_profile(folder: Path, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a build: the given ones, and those of a built profile for the rest.

    The mesh is that of a target that is named as it is recorded. Raises ArtifactError if there is no
    artifact, or no such profile.
    """
    artifact = open_artifact(folder)
    manifest = artifact.manifest
    found = {**structs.asdict(BuildOptions.of(named_profile(artifact, name).options)), **given}
    recorded = [manifest.targets[one] for one in given.get("targets", ()) if one in manifest.targets]
    for target in recorded:
        mesh = manifest.program_sets[target.program_set].mesh
        if mesh:
            plain = [one.removesuffix(name_suffix(mesh)) for one in given["targets"]]
            found |= {"mesh": mesh, "targets": plain}
    return found
