"""Which profile's recorded result counts for another."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from helpers.damage import PROFILE
from helpers.elsewhere import PROXY, TARGET, put_golden
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.trust.proxy import grid_of, patch_of, stands_for, witness_of


def witness(manifest: Manifest, profile: str) -> str | None:
    found = witness_of(manifest, manifest.targets[TARGET], manifest.profiles[profile])
    return None if found is None else found.name


def test_grids(proxied: Path) -> None:
    manifest = read_manifest(proxied)
    assert patch_of(manifest) == (2, 2)
    assert grid_of(manifest, manifest.profiles[PROFILE]) == (4, 6)
    assert grid_of(manifest, manifest.profiles[PROXY]) == (2, 3)


def test_who_stands_for_whom(proxied: Path) -> None:
    manifest = read_manifest(proxied)
    small, large = manifest.profiles[PROXY], manifest.profiles[PROFILE]
    assert stands_for(manifest, small, large)
    for one, other in ((large, small), (small, small), (replace(small, guidance=False), large)):
        assert not stands_for(manifest, one, other)
    for width, height in ((32, 32), (80, 32), (112, 32)):  # four tokens; ten of 24; wider
        assert not stands_for(manifest, replace(small, width=width, height=height), large)
    assert not stands_for(manifest, replace(small, options=replace(small.options, max_steps=9)), large)


def test_a_profile_with_a_result_is_its_own_witness(proxied: Path) -> None:
    manifest = read_manifest(proxied)
    assert witness(manifest, PROXY) == witness(manifest, PROFILE) == PROXY
    target = manifest.targets[TARGET]
    alone = replace(target, executables={PROFILE: target.executables[PROFILE]})
    assert witness(manifest.changed(targets={TARGET: alone}), PROFILE) is None
    put_golden(proxied, {})
    manifest = read_manifest(proxied)
    assert witness(manifest, PROFILE) == PROFILE and witness(manifest, PROXY) is None
