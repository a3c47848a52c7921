"""Profiles of an artifact that were built on this machine: in the user's cache, read after the artifact.

A folder per content digest holds a manifest of its own, with digests of every file, and the programs and
executables of these profiles. Nothing in it replaces what the artifact has.
"""

from __future__ import annotations

__all__ = ["merged_of", "overlaid", "overlay_of"]

from collections.abc import Set
from dataclasses import replace

from msgspec import structs

from wanrun.artifact.artifact import Artifact, Built, open_artifact
from wanrun.artifact.manifest import MANIFEST, Manifest
from wanrun.artifact.programs import Profile, ProgramSet
from wanrun.artifact.targets import Target
from wanrun.errors import WanError
from wanrun.files import canonical_json, sha256_of
from wanrun.machine.environment import host_environment
from wanrun.user_cache import CacheFolder


def overlay_of(manifest: Manifest) -> CacheFolder:
    """Returns the folder of an artifact's profiles that are built on this machine.

    Each kind of host, and each JAX, has its own: machines may share a home.
    """
    host, digest = sha256_of(canonical_json(host_environment("cpu"))), manifest.content_digest
    name = f"{digest.removeprefix('sha256:')[:32]}-{host[:8]}"
    return CacheFolder("profiles", name, "built profiles")


def overlaid(artifact: Artifact) -> Artifact:
    """Returns an artifact with the profiles that were built on this machine; its digests stay as they are.

    What was changed, and profiles of which a file is missing, are as if they were not there: they are built
    again.
    """
    kept = overlay_of(artifact.manifest)
    folder = kept.path
    if artifact.built is not None or not (folder / MANIFEST).is_file():
        return artifact
    try:
        there = open_artifact(folder)
    except WanError:
        return artifact
    own = {(one.name, one.sha256) for one in artifact.named()}
    whole = _whole(there, own)
    merged = merged_of(artifact.manifest, whole.manifest)
    new = frozenset(merged.profiles.keys() - artifact.manifest.profiles.keys())
    if not new:
        return artifact
    kept.use()
    files = {(one.name, one.sha256) for one in whole.named()}
    built = Built(folder, artifact.manifest, whole.manifest, new, frozenset(files - own))
    return replace(artifact, manifest=merged, built=built)


def _whole(there: Artifact, own: Set[tuple[str, str]]) -> Artifact:
    """Returns the overlay, with the profiles of which no file is missing here and in the artifact."""

    def missing(part: Artifact) -> bool:
        files = [one.name for one in part.named() if (one.name, one.sha256) not in own]
        return not all((there.folder / name).is_file() for name in files)

    if not missing(there):
        return there
    names = there.manifest.profiles
    return there.only(profiles=[name for name in names if not missing(there.only(profiles=[name]))])


def merged_of(own: Manifest, built: Manifest) -> Manifest:
    """Returns a manifest with the profiles of another one after its own."""
    targets = {name: _target(own.targets.get(name), one) for name, one in built.targets.items()}
    targets = {**own.targets, **targets}
    used = {one.program_set for one in targets.values()}
    sets = {
        key: _programs(own.program_sets.get(key), one)
        for key, one in built.program_sets.items()
        if key in used
    }
    sets = {**own.program_sets, **sets}
    has = {name for one in sets.values() for name in one.programs}
    following = 1 + max((one.index for one in own.profiles.values()), default=-1)
    later = {
        name: structs.replace(one, index=following + one.index)
        for name, one in built.profiles.items()
        if name in has and name not in own.profiles
    }
    profiles: dict[str, Profile] = {**own.profiles, **later}
    return structs.replace(own, profiles=profiles, program_sets=sets, targets=targets)


def _target(own: Target | None, built: Target) -> Target:
    """Returns a target with the executables of both; the artifact's own if they were compiled otherwise."""
    if own is None:
        return built
    alike = ("program_set", "folder", "environment", "options", "program_options")
    if any(getattr(own, name) != getattr(built, name) for name in alike):
        return own
    both = ("executables", "statistics")
    return structs.replace(own, **{name: {**getattr(built, name), **getattr(own, name)} for name in both})


def _programs(own: ProgramSet | None, built: ProgramSet) -> ProgramSet:
    """Returns a program set with the programs of both."""
    if own is None:
        return built
    return structs.replace(
        own, programs={**built.programs, **own.programs}, layers=own.layers or built.layers
    )
