"""An artifact's manifest with some of its targets alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from wanrun.artifact.manifest import Manifest
from wanrun.errors import UsageError


def with_targets(manifest: Manifest, artifact: Path, names: Collection[str]) -> Manifest:
    """Returns a manifest that lists these targets, with their profiles, programs and recorded results.

    Args:
        manifest: the artifact's.
        artifact: its folder, for messages.
        names: the targets; empty for all that there are.

    Raises:
        UsageError: for a target that the artifact does not have.
    """
    if not names:
        return manifest
    if unknown := sorted(set(names) - manifest.targets.keys()):
        raise UsageError(
            f"{artifact} has no target {unknown[0]}",
            expected="one of " + ", ".join(manifest.targets),
            remedy="choose one of these, or run wanbuild compile",
        )
    targets = {name: target for name, target in manifest.targets.items() if name in names}
    profiles = {profile for target in targets.values() for profile in target.executables}
    sets = {
        key: replace(
            own,
            programs={name: each for name, each in own.programs.items() if name in profiles},
            exported={name: each for name, each in own.exported.items() if name in profiles},
        )
        for key, own in manifest.program_sets.items()
        if key in {target.program_set for target in targets.values()}
    }
    return manifest.changed(
        targets=targets,
        program_sets=sets,
        profiles={name: each for name, each in manifest.profiles.items() if name in profiles},
        golden={name: each for name, each in manifest.golden.items() if name in profiles},
    )
