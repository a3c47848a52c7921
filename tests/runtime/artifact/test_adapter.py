"""The records of an adapter: their ranges, and what a manifest with and without them says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from helpers.manifests import plain_adapter, plain_manifest
from wanrun.artifact.adapter import AdapterContent, SamplingDefaults
from wanrun.artifact.manifest import MANIFEST, Manifest, manifest_of
from wanrun.errors import ArtifactError

STYLE = plain_adapter("style")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"rank": -1},
        {"experts": []},
        {"experts": ["vae"]},
        {"loras": []},
        {"options": {"solver": "ddim"}},
        {"options": {"timesteps": []}},
        {"options": {"boundary": 2}},
        {"options": {"fps": 0}},
    ],
)
def test_what_is_none(change: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(STYLE.content), **change}, AdapterContent)


def test_the_defaults_that_it_brings() -> None:
    assert SamplingDefaults().given == {}
    assert SamplingDefaults(num_steps=4, guidance_scale=0).given == {"num_steps": 4, "guidance_scale": 0}


def read(manifest: Manifest) -> Manifest:
    return manifest_of(manifest.encoded(), Path(MANIFEST))


def test_only_the_manifests_digest_covers_adapters() -> None:
    manifest = plain_manifest()
    changed = manifest.changed(adapters={"style": STYLE})
    assert changed.content_digest == manifest.content_digest  # a video without one is the same
    assert changed.manifest_digest != manifest.manifest_digest
    assert read(changed) == changed
    # Without adapters all is as it was before there were any.
    assert b"adapters" not in manifest.encoded() and b"adapters" in changed.encoded()
    assert changed.changed(adapters={}).encoded() == manifest.changed().encoded()


@pytest.mark.parametrize("name", ["", "a:0.5", "a,b", "a=b", "../a", ".a", "a/b", "a b", "a\n", "a" * 101])
def test_a_name_that_no_option_could_give_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        plain_manifest(adapters={name: STYLE})
    damaged = (
        plain_manifest().changed(adapters={"style": STYLE}).encoded().replace(b'"style": {', b'"a:1": {')
    )
    with pytest.raises(ArtifactError):
        manifest_of(damaged, Path(MANIFEST))
