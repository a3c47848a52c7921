"""Steps whose layers stream: the bits of whole steps, of every kind of stack, and what an error leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import wanrun
from helpers.damage import linked, own
from helpers.refusals import refuses
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.roles import roles_of
from wanrun.denoising.blending import Blending
from wanrun.denoising.noise import Noise
from wanrun.denoising.steps import Denoising
from wanrun.errors import ArtifactError
from wanrun.generation.streamed import StreamedStep
from wanrun.replay.samples import sample_media
from wanrun.request.profiles import has_guidance
from wanrun.timing.timings import Timings

VARIANTS = ("wan2.2-vace", "wan2.2-animate")
"""Control blocks and two experts; a condition, face adapters and no guidance."""


def streams(artifact: Path, memory: Literal["auto", "stream"] = "stream") -> wanrun.Pipeline:
    """Loads the first profile that has guidance as the model does."""
    manifest = read_manifest(artifact)
    profiles = (one for one in manifest.profiles.values() if one.guidance == has_guidance(manifest))
    return wanrun.load(artifact, profile=next(profiles).name, memory=memory, embeddings="none")


def made(artifact: Path, memory: Literal["auto", "stream"]) -> tuple[wanrun.Result, np.ndarray]:
    """Three steps, of which each expert has one; and the latents of the same in windows."""
    manifest = read_manifest(artifact)
    with streams(artifact, memory) as pipeline:
        media = sample_media(manifest, pipeline.profile)
        options = {"boundary": 0.9} if "boundary" in manifest.model.options else {}
        first = pipeline.generate("a fox", seed=3, num_steps=3, media=media, **options)
        again = pipeline.generate("a fox", seed=3, num_steps=3, media=media, **options)
        windows = blended(pipeline, pipeline.resolve("a fox", seed=3, num_steps=3, media=media, **options))
    np.testing.assert_array_equal(first.latents, again.latents)
    return first, windows


def blended(pipeline: wanrun.Pipeline, generation: wanrun.Generation) -> np.ndarray:
    """The latents of a generation with one more latent frame, in two windows of the same conditions."""
    session = pipeline.session(pipeline.profile)
    videos, channels, length, *cells = session.latents_shape
    embeddings, loop = pipeline.encode_prompts(generation.prompts), generation.options["loop"]
    windows = Blending(length + 1, length, 1)
    run = Denoising(generation.table, generation.ranges, embeddings, loop, Timings(), blending=windows)
    conditions = session.conditioning(generation.read_media(), timings=run.timings)
    noise = Noise(3)((videos, channels, length + 1, *cells))
    return session.denoise(run, noise, conditions, Noise(0))


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_streamed_steps_have_the_bits_of_whole_ones(
    variant: str, media_toy: Callable[[str], tuple[Path, Path]]
) -> None:
    artifact = media_toy(variant)[1]
    (whole, windows), (streamed, streamed_windows) = made(artifact, "auto"), made(artifact, "stream")
    assert (whole.timings.loop, streamed.timings.loop) == ("step", "stream")
    np.testing.assert_array_equal(streamed.latents, whole.latents)
    np.testing.assert_array_equal(streamed.frames, whole.frames)
    np.testing.assert_array_equal(streamed_windows, windows)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["auto", "stream"])
def test_a_warm_up_runs_all_roles_of_the_form(
    memory: Literal["auto", "stream"], media_toy: Callable[[str], tuple[Path, Path]]
) -> None:
    """The text encoder too, since no prompt was given."""
    with streams(media_toy("wan2.2-i2v")[1], memory) as pipeline:
        pipeline.warmup()
        session = pipeline.session(pipeline.profile)
        idle = session.programs.weights.executables.idle(pipeline.profile)
        roles = {name: session.programs[name].role for name in session.programs}
    expected = {role.name for role in roles_of(session.loop) if role.warm or role.when == "prompts"}
    assert {roles[name] for name in roles.keys() - set(idle)} == expected & set(roles.values())


@pytest.mark.slow
def test_an_error_in_a_pass_ends_it(
    media_toy: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation begins a new pass, with the first layer."""
    artifact = media_toy("wan2.2-vace")[1]
    manifest = read_manifest(artifact)
    own_keys, calls = StreamedStep._kv_of, list[tuple[str, int]]()

    def failing(self: StreamedStep, stack: str, number: int, weights: object) -> object:
        calls.append((stack, number))
        if len(calls) == 3:
            raise RuntimeError("in the middle")
        return own_keys(self, stack, number, weights)

    with streams(artifact) as pipeline:
        media = sample_media(manifest, pipeline.profile)
        expected = pipeline.generate("a fox", seed=3, num_steps=2, media=media).latents
        monkeypatch.setattr(StreamedStep, "_kv_of", failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            pipeline.generate("a fox", seed=3, num_steps=2, media=media)
        found = pipeline.generate("a fox", seed=3, num_steps=2, media=media).latents
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_damage_is_one_line(media_toy: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    artifact = linked(media_toy("wan2.2-vace")[1], tmp_path / "artifact")
    own(artifact, "weights")
    files = (artifact / "weights/transformer/blocks.ffn.up.weight/c").rglob("*")
    next(path for path in files if path.is_file()).unlink()
    with (
        refuses("damaged", ArtifactError, what="transformer/blocks/ffn/up/weight"),
        streams(artifact) as pipeline,
    ):
        media = sample_media(read_manifest(artifact), pipeline.profile)
        pipeline.generate("a fox", num_steps=2, media=media)


def test_a_profile_without_the_form(toy_artifact: Path) -> None:
    with refuses("not_built", ArtifactError, what="stream", remedy="--loop all"):
        wanrun.load(toy_artifact, memory="stream")
