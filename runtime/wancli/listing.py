"""Prints the contents of an artifact: its profiles, the targets that fit here, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wancli.command import fetch
from wanrun.terminal.lines import print_result

if TYPE_CHECKING:
    from wanrun import Artifact


def check_whole(artifact: Artifact) -> None:
    """Fetches what is missing, reads all of an artifact and checks every digest."""
    from wanrun.intact import check_intact

    fetch(artifact, artifact.named())
    check_intact(artifact, print_result)
    print_result(f"{artifact} is whole: {artifact.manifest.content_digest}")


def explain_targets(artifact: Artifact, printed: Callable[[str], None]) -> None:
    """Prints for each profile why each target is taken, or why not."""
    from wanrun.artifact.select import compared_targets, select_target

    for profile in sorted(artifact.manifest.profiles.values(), key=lambda profile: profile.index):
        taken = select_target(artifact, profile, allow_compile=True).name
        for one in compared_targets(artifact, profile):
            fits = "taken" if one.name == taken else f"fits, and {taken} is preferred"
            printed(f"{profile.name}  {one.name}: {'; '.join(map(str, one.mismatches)) or fits}")


def print_list(artifact: Artifact) -> None:
    """Prints the built profiles with their targets, the schedules and the LoRAs."""
    manifest = artifact.manifest
    print_result(f"{manifest.model.variant}  {manifest.content_digest}")
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        targets = [name for name, target in manifest.targets.items() if profile.name in target.executables]
        here = ", built here" if artifact.built_here(profile.name) else ""
        print_result(f"{profile.name}  targets: {', '.join(sorted(targets)) or 'none'}{here}")
    for name, schedule in sorted(manifest.schedules.items(), key=lambda one: -one[1].evaluations):
        print_result(f"schedule {name}  {schedule.describe()}")
    for name, adapter in manifest.adapters.items():
        print_result(f"lora {name}  {adapter.describe()}")
    if not manifest.profiles:
        print_result("no profiles: run wanbuild compile")
