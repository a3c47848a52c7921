"""Small profiles that stand for large ones, whose results take a chip or a day of a CPU to record."""

from __future__ import annotations

from msgspec.structs import replace

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target


def patch_of(manifest: Manifest) -> tuple[int, int]:
    """Returns the latent rows and columns of a transformer's token."""
    _, rows, columns = manifest.configs["transformer"]["patch_size"]
    return rows, columns


def grid_of(manifest: Manifest, profile: Profile) -> tuple[int, int]:
    """Returns the rows and columns of the tokens of a profile's frame."""
    rows, columns = (patch * manifest.model.vae_spatial for patch in patch_of(manifest))
    return profile.height // rows, profile.width // columns


TOKENS = 6
"""The fewest tokens of a proxy's frame: fewer do not show rotation."""


def stands_for(manifest: Manifest, small: Profile, large: Profile) -> bool:
    """Returns whether profiles differ in nothing but their size, and the large one can repeat the small."""
    (rows, columns), (height, width) = grid_of(manifest, small), grid_of(manifest, large)
    tokens = rows * columns
    fits = rows <= height and columns <= width and height * width % tokens == 0 and tokens >= TOKENS
    same = replace(small, width=large.width, height=large.height, index=large.index) == large
    return fits and same and small.name != large.name


def witness_of(manifest: Manifest, target: Target, profile: Profile) -> Profile | None:
    """Returns the profile whose recorded result counts for another: itself, or its smallest proxy."""
    if profile.name in manifest.golden:
        return profile
    known = manifest.golden.keys() & target.executables.keys()
    others = (one for name, one in manifest.profiles.items() if name in known)
    proxies = (one for one in others if stands_for(manifest, one, profile))
    return min(proxies, key=lambda one: one.width * one.height, default=None)
