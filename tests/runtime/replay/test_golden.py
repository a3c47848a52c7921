"""The recorded result of a profile: as it is written, read and compared; its sample images and videos."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.manifests import full_manifest, plain_manifest, with_model, without_past
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, Recorded, read_manifest
from wanrun.artifact.named import GOLDEN
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, VerificationError
from wanrun.replay.golden import STEPS, Golden, compare, read_golden, recorded_generation
from wanrun.replay.samples import sample_image, sample_mask, sample_media, sample_video
from wanrun.request.generation import Generation
from wanrun.request.resolve import resolve

# --- golden ---


HERE = Golden("0" * 64, "1" * 64, (0.5, -1.0), {"cores": 2}, 1e-4, (0, 128, 255))
ELSEWHERE = dataclasses.replace(HERE, machine={"cores": 4}, latents_sha256="2" * 64, frames_sha256="3" * 64)


def recorded(folder: Path, content: bytes) -> Artifact:
    """An artifact with a recorded result of a profile."""
    (folder / "golden.json").write_bytes(content)
    record = Recorded(file="golden.json", sha256=hashlib.sha256(content).hexdigest())
    return Artifact(plain_manifest(golden={"a": record}), folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff", b'{"latents_sha256": 3}', b"[" * 100_000, bytes(2**20 + 1)],
    ids=["empty", "no fields", "a list", "no text", "another type", "deep", "large"],
)
def test_a_recorded_result_that_is_none(tmp_path: Path, content: bytes) -> None:
    """As an artifact may have it whose maker signs it."""
    artifact = recorded(tmp_path, content)
    large = len(content) > 2**20
    code: ErrorCode = "damaged" if large else "unreadable"
    remedy = GOLDEN.remedy if large else "wanbuild verify --record"
    with refuses(code, ArtifactError, what="golden.json", remedy=remedy):
        read_golden(artifact, "a")
    (tmp_path / "golden.json").unlink()
    with refuses("damaged", ArtifactError, found="No such file"):
        read_golden(artifact, "a")


def test_a_recorded_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    artifact = recorded(tmp_path, json.dumps(HERE.as_json()).encode())
    assert read_golden(artifact, "a") == HERE


def test_a_distilled_model_is_recorded_on_the_solver_s_own_grid(toy_artifact: Path) -> None:
    """Also one of as many steps as a record: older records of it are of that grid, which a boundary parts."""
    plain = read_manifest(toy_artifact)
    (profile,) = plain.profiles.values()
    distilled = with_model(plain, {"num_steps": STEPS, "timesteps": (1000.0, 900.0, 800.0, 700.0)})

    def recorded_of(manifest: Manifest) -> Generation:
        artifact = Artifact(manifest, toy_artifact)
        pipeline: Any = SimpleNamespace(
            manifest=manifest, profile=profile, resolve=functools.partial(resolve, artifact)
        )
        return recorded_generation(pipeline)

    found, expected = recorded_of(distilled), recorded_of(plain)
    assert found.options == expected.options and found.options["num_steps"] == STEPS
    assert np.array_equal(found.table.coefficients, expected.table.coefficients)
    assert found.ranges == expected.ranges


def test_a_record_says_its_number_of_steps(tmp_path: Path) -> None:
    """Older ones have two; none has so many that a replay takes a day."""

    def record(steps: object) -> Artifact:
        return recorded(tmp_path, json.dumps(HERE.as_json() | {"steps": steps}).encode())

    for steps in (2, 4, 64):
        assert read_golden(record(steps), "a").steps == steps
    for wrong in (0, 65, "2"):
        with refuses("unreadable", ArtifactError, what="golden.json", found="$.steps"):
            read_golden(record(wrong), "a")


def test_on_the_same_machine_digests_are_compared() -> None:
    assert compare(HERE, HERE) == "digests equal"
    for what in ("latents_sha256", "frames_sha256"):
        with pytest.raises(VerificationError, match=f"{what} differs from golden/"):
            compare(HERE, dataclasses.replace(HERE, **{what: "4" * 64}))


def test_elsewhere_values_are_compared() -> None:
    assert compare(HERE, ELSEWHERE).endswith(" 0.0e+00")
    near = dataclasses.replace(ELSEWHERE, samples=(0.50001, -1.0), frame_samples=(1, 127, 254))
    assert compare(HERE, near).endswith(" 8.9e-06")
    for samples, found in (((0.501, -1.0), "e-04"), ((math.nan, -1.0), "nan"), ((0.5,), 1)):
        with refuses("other_results", VerificationError, what="latents", found=found):
            compare(HERE, dataclasses.replace(ELSEWHERE, samples=samples))


def test_frames_of_a_tiny_decoder_are_compared() -> None:
    """On the same machine they are equal, elsewhere near; and a record without them has no such decoder."""
    here, there = (dataclasses.replace(one, tiny_samples=(10, 20)) for one in (HERE, ELSEWHERE))
    assert compare(here, here) == "digests equal"
    assert "tiny_samples" in here.as_json() and "tiny_samples" not in HERE.as_json()
    assert compare(here, dataclasses.replace(there, tiny_samples=(11, 20)))
    for found in (dataclasses.replace(here, tiny_samples=(11, 20)), HERE, ELSEWHERE):
        with pytest.raises(VerificationError, match="the frames differ"):
            compare(here, found)


@pytest.mark.parametrize("frames", [(0, 128, 251), (), (0, 128)])
def test_frames_that_differ(frames: tuple[int, ...]) -> None:
    with refuses("other_results", VerificationError, what="frames", expected=" 1.03 of 255"):
        compare(HERE, dataclasses.replace(ELSEWHERE, frame_samples=frames))


# --- samples ---


def test_they_are_fixed_by_the_seed() -> None:
    first, again, other = (np.asarray(sample_image(40, 24, seed)) for seed in (1, 1, 2))
    assert first.shape == (24, 40, 3)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    frames = [np.asarray(frame) for frame in sample_video(40, 24, 3, 1)]
    assert len(frames) == 3 and not np.array_equal(frames[0], frames[1])


def test_a_part_of_each_mask_is_on() -> None:
    masks = np.stack([np.asarray(mask) for mask in sample_mask(96, 64, 5)])
    assert all(0 < mask.mean() < 255 for mask in masks)
    assert not np.any(masks.min(0)) and not np.array_equal(masks[0], masks[4])


def test_media_are_those_that_the_model_takes() -> None:
    manifest = without_past(full_manifest())
    (profile,) = manifest.profiles.values()
    assert sample_media(plain_manifest(), profile) is None
    media = sample_media(manifest, profile, mode="replace", without=["mask"])
    assert media is not None and media.image is not None and media.mask is None
    # Of a model with windows fewer than a window has, so that the last ones are padded.
    assert isinstance(media.video, list) and len(media.video) == profile.num_frames - 2
