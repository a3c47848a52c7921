"""The small profile that stands for a large one where its chip is not: see ``wanrun.trust.proxy``."""

from __future__ import annotations

from msgspec.structs import replace

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.machine.environment import built_elsewhere
from wanrun.trust.proxy import grid_of, patch_of, stands_for

TOKENS = 6
"""The fewest tokens of a proxy's frame: two rows of three. With 81 frames they are 126, which two cores run
through 14B parameters in minutes."""


def proxy_for(manifest: Manifest, profile: Profile) -> Profile | None:
    """Returns the smallest profile that stands for another one; None if that one is as small."""
    tall, wide = (patch * manifest.model.vae_spatial for patch in patch_of(manifest))
    height, width = grid_of(manifest, profile)
    grids = [(rows, columns) for rows in range(2, height + 1) for columns in range(2, width + 1)]
    for rows, columns in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid)):
        small = replace(profile, width=columns * wide, height=rows * tall)
        if rows * columns >= TOKENS and rows != columns and stands_for(manifest, small, profile):
            return small
    return None


def proxies_of(manifest: Manifest, target: Target) -> dict[str, Profile]:
    """Returns the proxies of a target's profiles that have no recorded result, by those profiles' names; none
    for a target whose chip was there.
    """
    if not built_elsewhere(target.environment):
        return {}
    profiles = (manifest.profiles[name] for name in target.executables if name not in manifest.golden)
    found = {profile.name: proxy_for(manifest, profile) for profile in profiles}
    return {name: small for name, small in found.items() if small is not None}
