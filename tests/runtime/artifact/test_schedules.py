"""A schedule in the manifest: ranges, digests, and what is said of it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.schedules import Schedule

FIVE = Schedule(solver="unipc", timesteps=(1000.0, 900.0, 700.0, 450.0, 150.0), guidance_scale=5.0)


def test_what_is_said_of_it() -> None:
    assert re.findall(r"unipc|[\d.]+", FIVE.describe()) == ["5", "unipc", "10"]
    figures = {"psnr": 38.9, "plain_psnr": 35.2, "held_out": 8}
    measured = msgspec.structs.replace(FIVE, guidance_scale=1, measured=figures)
    assert re.findall(r"unipc|[\d.]+", measured.describe()) == ["5", "unipc", "5", "38.9", "35.2"]


@pytest.mark.parametrize(
    "change", [{"solver": "ddim"}, {"timesteps": []}, {"timesteps": [0]}, {"boundary": 2}, {"steps": 3}]
)
def test_what_is_none(change: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(FIVE), **change}, Schedule)


def test_only_the_manifests_digest_covers_schedules(toy_artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(toy_artifact)
    changed = manifest.changed(schedules={"five": FIVE})
    assert changed.content_digest == manifest.content_digest  # it makes no other video
    assert changed.manifest_digest != manifest.manifest_digest
    changed.write(tmp_path)
    assert read_manifest(tmp_path) == changed
    # Without schedules all is as it was before there were any.
    assert changed.changed(schedules={}).encoded() == (toy_artifact / "manifest.json").read_bytes()
    assert b"schedules" not in manifest.encoded() and b"schedules" in changed.encoded()
