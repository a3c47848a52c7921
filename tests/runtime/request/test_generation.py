"""What a generation says of itself: its media, windows, and the metadata of its videos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.manifests import plain_manifest, with_model
from helpers.media_files import task_of
from helpers.options import generation
from helpers.refusals import refuses
from wanrun import __version__
from wanrun.artifact.adapter import Lora
from wanrun.artifact.manifest import Component
from wanrun.files import sha256_of
from wanrun.media.inputs import Inputs, Media
from wanrun.request.generation import influences_of
from wanrun.request.media import given_media, media_of
from wanrun.request.request import Request

ONE = plain_manifest(components={"transformer": Component("transformer", {})})


def test_the_metadata() -> None:
    found = generation(seed=3, fps=24)
    expected = {
        **found.options,
        "content_digest": found.manifest.content_digest,
        "fps": 24.0,
        "num_videos": 1,
        "wanrun": __version__,
        "text_encoder": "jax",
    }
    assert found.metadata(None, {"text_encoder": "jax"}) == expected
    lora = Lora(file="style.safetensors", sha256="0", scale=0.5, component=None, left_out=3)
    merged = replace(found, manifest=found.manifest.changed(loras=(lora,)))
    assert merged.metadata(None, {})["merged_loras"] == [lora.facts]
    facts = {"video": "v.mp4", "video_sha256": "1"}
    metadata = generation().metadata(Inputs(facts=facts), {})
    assert metadata["video_file"] == "v.mp4" and "video" not in metadata  # which is the number of the result
    long = generation().metadata(Inputs(num_frames=33), {})
    assert (long["num_frames"], long["segment_frames"]) == (33, 9)


def test_given_latents_replace_the_seed() -> None:
    latents = np.ones((1, 2), np.float32)
    facts = influences_of(latents, "z.npy")
    assert facts == {"latents": "z.npy", "latents_sha256": sha256_of(latents.tobytes())}
    assert generation(seed=3).metadata(None, facts)["seed"] is None
    assert generation(seed=3).metadata(Inputs(num_frames=33), facts)["seed"] == 3  # of the later windows
    assert influences_of(None) == {}


def test_media_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from wanrun.media import prepare

    read, seen = Inputs(), list[Media]()

    def load_media(manifest: Any, profile: Any, media: Media, **options: Any) -> Inputs:
        seen.append(media)
        return read

    monkeypatch.setattr(prepare, "load_media", load_media)
    manifest = with_model(ONE, variant="wan2.2-i2v", task=task_of("wan2.2-i2v", encoder=False))
    assert generation(manifest, image="i.png").read_media() is read and seen == [Media(image=Path("i.png"))]
    with refuses("missing_parameter", what="wan2.2-i2v") as caught:
        generation(manifest)
    assert caught.value.fields == ("image",)
    held = with_model(ONE, task=task_of("wan2.2-ti2v", encoder=False))
    assert generation(held).read_media() is None and len(seen) == 1  # its image may be left out


@pytest.mark.parametrize(("frames", "overlap", "windows"), [(None, 1, 1), (9, 1, 1), (33, 1, 4), (29, 5, 6)])
def test_the_windows(frames: int | None, overlap: int, windows: int) -> None:
    inputs = Inputs(num_frames=frames, segment_overlap=overlap)
    assert generation().counts(inputs).windows == windows and generation().counts().windows == 1


def test_the_media_of_a_request() -> None:
    """The same files are the same media, whatever else is asked for."""
    fields: dict[str, Any] = {
        "image": "i.png",
        "reference_image": ("r.png", "s.png"),
        "segment_overlap": 5,
    }
    media = media_of(Request(prompt="a", **fields))
    paths = Path("r.png"), Path("s.png")
    assert media == Media(image=Path("i.png"), reference_image=paths, segment_overlap=5)
    assert hash(media) == hash(media_of(Request(prompt="b", seed=3, **{**fields, "image": "./i.png"})))
    for other in ({"image": "j.png"}, {"reference_image": ("s.png", "r.png")}, {"segment_overlap": 1}):
        assert media_of(Request(prompt="a", **{**fields, **other})) != media
    assert media_of(Request(prompt="a fox", conditioning_scale=2.0)) == Media()
    assert media_of(Request(prompt="a", reference_image="r.png")).reference_image == (Path("r.png"),)


def test_media_in_one_way() -> None:
    plain, media = Request(prompt="a fox"), Media(image="a.png")
    assert given_media(plain, None, None) is None
    assert given_media(plain, media, None) is media
    named = Request(prompt="a fox", image="b.png", segment_overlap=5, mode="replace")
    found = Media(image=Path("b.png"), mode="replace", segment_overlap=5)
    assert given_media(named, None, None) == found
    with refuses("conflict", what="image"):
        given_media(named, media, None)
    with refuses("conflict", what="image"):
        given_media(named, None, Inputs())
    with refuses("conflict", what="media and inputs"):
        given_media(plain, media, Inputs())


def test_an_overlap_may_be_given_beside_media() -> None:
    five = Request(prompt="a fox", segment_overlap=5)
    assert given_media(five, Media(image="a.png"), None) == Media(image="a.png", segment_overlap=5)
    assert given_media(five, None, None) == Media(segment_overlap=5)
    assert given_media(five, None, Inputs(segment_overlap=5)) is None
    with refuses("mismatch", what="segment_overlap", expected=1, found=5):
        given_media(five, None, Inputs())
