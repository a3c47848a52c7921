"""The small profile that stands for a large one where its chip is not: see ``wanrun.trust.proxy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.machine.environment import built_elsewhere
from wanrun.trust.proxy import grid_of, patch_of, stands_for

MOST_TOKENS = 64
"""The most tokens of a proxy's frame: with 81 frames they are 1344, ten times the work of the fewest."""


def proxy_for(
    manifest: Manifest, profile: Profile, taken: Mapping[str, Profile] | None = None
) -> Profile | None:
    """Returns the smallest profile that stands for another one, which may be the profile itself.

    Grids with two rows and columns and more come first, those that are no square, then those with few tokens.

    Args:
        manifest: the artifact's.
        profile: the profile.
        taken: profiles by name that there are; one of the same name and other options is in the way.

    Returns:
        None if there is none of at most ``MOST_TOKENS``: the product of the rows and columns has no such
        divisor.
    """
    tall, wide = (patch * manifest.model.vae_spatial for patch in patch_of(manifest))
    height, width = grid_of(manifest, profile)
    if height * width <= MOST_TOKENS:
        return profile
    for rows, columns in sorted(_grids(height, width), key=_preferred):
        small = replace(profile, width=columns * wide, height=rows * tall)
        other = (taken or {}).get(small.name, small)
        if stands_for(manifest, small, profile) and replace(other, index=small.index) == small:
            return small
    return None


def _grids(height: int, width: int) -> Iterator[tuple[int, int]]:
    for rows in range(1, height + 1):
        yield from ((rows, columns) for columns in range(1, min(width, MOST_TOKENS // rows) + 1))


def _preferred(grid: tuple[int, int]) -> tuple[bool, bool, int, tuple[int, int]]:
    return min(grid) < 2, grid[0] == grid[1], grid[0] * grid[1], grid


def proxies_of(manifest: Manifest, target: Target) -> dict[str, Profile | None]:
    """Returns the proxies of a target's profiles that have no recorded result, by those profiles' names; none
    for a target whose chip was there. A profile is None that has no proxy.
    """
    if not built_elsewhere(target.environment):
        return {}
    taken, found = dict(manifest.profiles), dict[str, Profile | None]()
    for name in target.executables:
        if name not in manifest.golden:
            found[name] = small = proxy_for(manifest, manifest.profiles[name], taken)
            taken |= {} if small is None else {small.name: small}
    return found


def missing_proxies(manifest: Manifest, target: Target, report: Callable[[str], None]) -> list[Profile]:
    """Returns the proxies that a target's profiles need besides those profiles; reports who has none."""
    found = proxies_of(manifest, target)
    for name in (name for name, small in found.items() if small is None):
        report(f"{name}: no small profile can stand for it, so wanrun will refuse it on its chip")
    small = {one.name: one for one in found.values() if one is not None and one.name not in found}
    return list(small.values())
