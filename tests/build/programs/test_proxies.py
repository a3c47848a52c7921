"""The small profiles that stand for large ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import PROXY, TARGET, put_golden
from wanbuild.options import BuildOptions
from wanbuild.plan.published import published_manifest, published_names
from wanbuild.programs.export import profile_of
from wanbuild.programs.proxies import proxies_of, proxy_for
from wanbuild.programs.shape import Shape
from wanrun.artifact.manifest import read_manifest
from wanrun.trust.proxy import stands_for


@pytest.mark.parametrize(
    ("model", "size", "small"),
    [
        ("wan2.1-t2v-14b", (1280, 720), (48, 32)),
        ("wan2.1-t2v-1.3b", (832, 480), (48, 32)),
        ("wan2.2-ti2v-5b", (1280, 704), (128, 64)),  # 6 does not divide its 22 x 40 tokens
        ("wan2.1-t2v-1.3b", (1264, 784), (112, 112)),  # 7 x 7 of 49 x 79: no divisor but one row is smaller
        ("wan2.1-t2v-1.3b", (464, 464), (464, 16)),  # one row of 29 x 29
        ("wan2.1-t2v-1.3b", (1072, 1072), None),  # 67 is a prime
        ("wan2.1-t2v-1.3b", (16, 96), (16, 96)),
        ("wan2.1-t2v-1.3b", (96, 64), (96, 64)),
    ],
)
def test_the_smallest_that_can_be_repeated(
    model: str, size: tuple[int, int], small: tuple[int, int] | None
) -> None:
    manifest = published_manifest(published_names()[model])
    profile = profile_of(manifest, Shape(*size, 81, 1, True), BuildOptions())
    found = proxy_for(manifest, profile)
    assert small == (None if found is None else (found.width, found.height))
    if found is not None and found != profile:
        assert stands_for(manifest, found, profile) and not stands_for(manifest, profile, found)
        other = profile_of(manifest, Shape.of(found), BuildOptions(loop="step"))
        second = proxy_for(manifest, profile, {other.name: other})
        assert second is not None and second.name != found.name and stands_for(manifest, second, profile)
        for change in ({"guidance": False}, {"num_frames": 5}, {"num_videos": 2}, {"num_references": 1}):
            assert not stands_for(manifest, msgspec.structs.replace(found, **change), profile)


def test_who_needs_one(proxied: Path, toy_artifact: Path) -> None:
    """Profiles of a chip that was not there, until they are recorded themselves."""
    native, manifest = read_manifest(toy_artifact), read_manifest(proxied)
    assert proxies_of(native, native.targets["cpu"]) == {}
    needed = proxies_of(manifest, manifest.targets[TARGET])
    assert needed == {PROFILE: manifest.profiles[PROFILE]}  # which is small enough to be recorded itself
    put_golden(proxied, {})
    manifest = read_manifest(proxied)
    assert proxies_of(manifest, manifest.targets[TARGET]).keys() == {PROXY}
