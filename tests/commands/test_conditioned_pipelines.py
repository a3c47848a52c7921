"""``wanrun.load`` and ``generate`` with images and videos: what is read, encoded, kept and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.pictures import picture, pictures
from helpers.refusals import refuses
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.denoising.latents import leading_latents
from wanrun.errors import ArtifactError, UsageError, WanError, field
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Media
from wanrun.media.prepare import load_media
from wanrun.replay.samples import sample_media
from wanrun.timing.timings import Timings

pytestmark = pytest.mark.slow

Toys = Callable[[str], tuple[Path, Path]]
VARIANTS = ("wan2.1-flf2v", "wan2.1-vace", "wan2.2-animate")
PROMPT = "a fox in the snow"


def encodings(timings: Timings) -> int:
    """How often images or videos were encoded."""
    return len(timings.spans.get("encode_media", ()))


def media_of(pipeline: Pipeline) -> Media:
    media = sample_media(pipeline.manifest, pipeline.profile)
    assert media is not None
    return media


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_inputs_are_encoded_once(media_toy: Toys, variant: str) -> None:
    _, artifact = media_toy(variant)
    manifest = read_manifest(artifact)
    profile = min(manifest.profiles.values(), key=lambda p: (p.guidance, p.num_references, p.index))
    inputs = load_media(manifest, profile, sample_media(manifest, profile) or Media())
    timings = Timings()
    with load(
        artifact, guidance=profile.guidance, prompts=[PROMPT], inputs=inputs, timings=timings
    ) as pipeline:
        assert encodings(timings) == 1  # while the transformer was read
        pipeline.warmup(timings)
        first = pipeline.generate(PROMPT, "", inputs=inputs, num_steps=2, timings=timings)
        again = pipeline.generate(PROMPT, "", inputs=inputs, num_steps=2, timings=timings)
        assert encodings(timings) == 1
        read = pipeline.generate(PROMPT, "", media=media_of(pipeline), num_steps=2, timings=timings)
        assert encodings(timings) == 2
        assert timings.cache_misses == 0
        own = pipeline.latents_shape[2] - leading_latents(manifest, profile)
        assert first.latents.shape[2] == own and first.all_latents.shape == pipeline.latents_shape
        decoded = pipeline.decode(first.latents)
        np.testing.assert_array_equal(decoded, pipeline.decode(first.all_latents))
    for other in (again, read):
        assert np.array_equal(first.frames, other.frames)
    assert first.options["num_frames"] == first.frames.shape[1]


@pytest.mark.parametrize(("variant", "expected"), [("wan2.1-i2v", True), ("wan2.2-animate", False)])
def test_guidance_is_as_published_by_default(media_toy: Toys, variant: str, expected: bool) -> None:
    with load(media_toy(variant)[1], lazy=True) as pipeline:
        assert pipeline.profile.guidance is expected


@pytest.mark.thorough
def test_from_nothing(media_toy: Toys, ti2v_artifact: Path) -> None:
    """VACE encodes that there is no video; TI2V from text alone encodes nothing, and reads no VAE ahead."""
    timings = Timings()
    with load(media_toy("wan2.1-vace")[1], timings=timings, prompts=[PROMPT, ""]) as pipeline:
        assert "vae" in {span.label for span in timings.labelled_spans if span.phase == "restore"}
        empty = pipeline.generate(PROMPT, "", num_steps=2)
        assert np.array_equal(empty.frames, pipeline.generate(PROMPT, "", media=Media(), num_steps=2).frames)
    timings = Timings()
    with load(ti2v_artifact, timings=timings, prompts=[PROMPT, ""]) as pipeline:
        assert "vae" not in {span.label for span in timings.labelled_spans if span.phase == "restore"}
        text = pipeline.generate(PROMPT, "", num_steps=2)
        assert np.array_equal(text.frames, pipeline.generate(PROMPT, "", media=Media(), num_steps=2).frames)
        image = pipeline.generate(PROMPT, "", media=Media(image=picture(90, 70)), num_steps=2)
        assert not np.array_equal(text.frames, image.frames)
        assert np.array_equal(text.frames, pipeline.generate(PROMPT, "", num_steps=2).frames)


@pytest.mark.thorough
def test_reference_images_choose_the_profile(media_toy: Toys) -> None:
    """Of the same pipeline: with two of them, and without."""
    _, artifact = media_toy("wan2.1-vace")
    references = Media(reference_image=(picture(90, 70, 1), picture(70, 90, 2)))
    with load(artifact, prompts=[PROMPT, ""]) as pipeline:
        assert pipeline.profile.num_references == 0
        found = [pipeline.generate(PROMPT, "", media=media, num_steps=2) for media in (references, Media())]
        with refuses("not_built", ArtifactError, what="1 reference image", remedy="wanbuild compile"):
            pipeline.generate(PROMPT, "", media=Media(reference_image=(picture(90, 70),)), num_steps=2)
    for count, media, expected in ((2, references, found[0]), (0, Media(), found[1])):
        with load(artifact, num_references=count, prompts=[PROMPT, ""]) as pipeline:
            alone = pipeline.generate(PROMPT, "", media=media, num_steps=2)
        assert np.array_equal(alone.latents, expected.latents)
        assert np.array_equal(alone.frames, expected.frames)


@pytest.mark.thorough
def test_profiles_share_what_was_encoded(media_toy: Toys) -> None:
    """With guidance and without, the same inputs are encoded by the same programs, and so once."""
    _, artifact = media_toy("wan2.2-animate")
    manifest = read_manifest(artifact)
    profile = next(profile for profile in manifest.profiles.values() if profile.guidance)
    inputs, timings = load_media(manifest, profile, animation(13)), Timings()
    with load(artifact, guidance=False, prompts=[PROMPT, ""], timings=timings) as pipeline:
        unguided = pipeline.generate(PROMPT, "", inputs=inputs, num_steps=2, timings=timings)
        guided = pipeline.generate(PROMPT, "", inputs=inputs, num_steps=2, guidance_scale=3, timings=timings)
        assert encodings(timings) == 1
    assert not np.array_equal(unguided.latents, guided.latents)
    with load(artifact, guidance=True, prompts=[PROMPT, ""]) as pipeline:
        alone = pipeline.generate(PROMPT, "", inputs=inputs, num_steps=2, guidance_scale=3)
    assert np.array_equal(alone.latents, guided.latents) and np.array_equal(alone.frames, guided.frames)


def animation(frames: int, **changes: Any) -> Media:
    return msgspec.structs.replace(
        Media(
            image=picture(90, 70, 1),
            pose_video=pictures(frames, 96, 64, 2),
            face_video=pictures(frames, 20, 24, 3),
        ),
        **changes,
    )


@pytest.mark.thorough
def test_segments_encode_the_image_once(media_toy: Toys) -> None:
    """Also where the image encoder is let go of as soon as it has run."""
    _, artifact = media_toy("wan2.2-animate")
    results = []
    for memory in ("auto", "low"):
        timings = Timings()
        with load(artifact, memory=memory, timings=timings, prompts=[PROMPT]) as pipeline:
            results.append(pipeline.generate(PROMPT, media=animation(30), num_steps=2, timings=timings))
        assert encodings(timings) == 3  # each segment's videos
        reads = [span for span in timings.labelled_spans if span.phase == "restore"]
        assert [span.label for span in reads].count("image_encoder") == 1
    assert np.array_equal(results[0].frames, results[1].frames)
    assert results[0].frames.shape[:2] == (1, 30) and results[0].options["segment_frames"] == 13


@pytest.mark.thorough
def test_given_latents_are_the_first_segments(media_toy: Toys) -> None:
    with load(media_toy("wan2.2-animate")[1], prompts=[PROMPT]) as pipeline:
        noise = np.random.default_rng(0).standard_normal(pipeline.latents_shape, np.float32)
        media = animation(20)
        one, other = (
            pipeline.generate(PROMPT, media=media, latents=noise, seed=seed, num_steps=2).frames
            for seed in (1, 2)
        )
        assert np.array_equal(one[:, :13], other[:, :13])
        assert not np.array_equal(one[:, 14:], other[:, 14:])  # the seed's


@pytest.mark.thorough
def test_one_expert_at_a_time(media_toy: Toys) -> None:
    """Two experts see the same condition, whether both are in memory or not."""
    _, artifact = media_toy("wan2.2-i2v")
    frames = []
    for memory in ("auto", "low"):
        with load(artifact, memory=memory, prompts=[PROMPT, ""]) as pipeline:
            result = pipeline.generate(
                PROMPT, "", media=Media(image=picture(90, 70)), num_steps=4, boundary=0.9
            )
            frames.append(result.frames)
            assert pipeline.timings.placement == ("both" if memory == "auto" else "one")
    assert np.array_equal(*frames)


def test_refusals(media_toy: Toys) -> None:
    _, artifact = media_toy("wan2.2-animate")
    with load(artifact, lazy=True) as pipeline:
        manifest, profile = pipeline.manifest, pipeline.profile

        def fails(kind: type[WanError], code: ErrorCode, what: str, **given: Any) -> None:
            with refuses(code, kind, what=what):
                pipeline.generate(PROMPT, num_steps=1, **given)

        inputs = load_media(manifest, profile, animation(20))
        fails(UsageError, "missing_parameter", field("pose_video"))
        fails(UsageError, "conflict", "inputs", media=animation(20), inputs=inputs)
        fails(UsageError, "mismatch", field("segment_overlap"), inputs=inputs, segment_overlap=5)
        other = load_media(manifest, msgspec.structs.replace(profile, num_frames=17), animation(20))
        short = replace(other, arrays=cut(other.arrays, 5))
        fails(ArtifactError, "damaged", "program", inputs=short)
        fails(UsageError, "invalid_value", field("video"), media=Media(video=pictures(9, 96, 64)))


def cut(arrays: Any, frames: int) -> dict[str, Any]:
    """The arrays with shorter videos, as of a profile of fewer frames."""
    return {name: array[:frames] if name.endswith("_video") else array for name, array in arrays.items()}
