"""``encode_video`` against the methods of diffusers' pipelines, and the last frames that decoding keeps.

Images and videos are random bytes of the profile's size, so that the reference's processors do nothing but
scale them. Programs are compiled once per task and chunk; 21 frames are 6 latent ones, and the 5 after the
first leave the last piece of two, and of three, to be filled up.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    WanAnimatePipeline,
    WanImageToVideoPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from PIL import Image

from helpers.compiling import fast_jit
from helpers.media_files import task_of
from helpers.vae_reference import ALL, TOLERANCE, Pair, decoded, pair, program, relative_error
from wanbuild.variants.conditioner import Conditioner
from wanbuild.variants.table import variants

WIDTH, HEIGHT, FRAMES = 48, 32, 21
CHUNKS = (1, 2, 3, ALL)
SEGMENTS = ((1, False), (1, True), (5, True))
"""Frames that segments share, and whether there is one before."""

ONE = np.int32(1)
NONE = np.int32(0)

VARIANTS = {
    "i2v": "wan2.1-i2v",
    "flf2v": "wan2.1-flf2v",
    "i2v22": "wan2.2-i2v",
    "ti2v": "wan2.2-ti2v",
    "vace": "wan2.1-vace",
    "animate": "wan2.2-animate",
}

_Media = Mapping[str, np.ndarray]


def vae(residual: bool = False) -> Pair:
    """The form of Wan 2.1 or of 2.2 TI2V; only the latter's latents are of 48 channels."""
    small: dict[str, Any] = {"base_dim": 6, "dim_mult": (1, 2, 2, 2), "num_res_blocks": 1}
    if not residual:
        return pair(**small)
    rng = np.random.default_rng(48)
    patches = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    statistics = {
        "latents_mean": tuple(rng.normal(0, 0.3, 48).round(4).tolist()),
        "latents_std": tuple(rng.uniform(0.5, 2, 48).round(4).tolist()),
    }
    return pair(**small, **patches, **statistics, is_residual=True, z_dim=48)


@functools.cache
def conditioner(task: str, chunk: int = ALL, frames: int = FRAMES, references: int = 0) -> Conditioner:
    model = vae(residual=task == "ti2v")
    kind = variants()[VARIANTS[task]].conditioner
    assert kind is not None
    inputs = task_of(VARIANTS[task]).inputs
    return kind(model.module, model.config, inputs, WIDTH, HEIGHT, frames, references, chunk)


@functools.cache
def compiled(task: str, *options: int) -> Any:
    arguments = conditioner(task, *options).arguments()
    function = fast_jit(conditioner(task, *options))
    return function.lower(vae(residual=task == "ti2v").params, **arguments).compile()


def condition(task: str, media: Mapping[str, Any], *options: int) -> dict[str, np.ndarray]:
    """Runs a task on its inputs by name; checks their shapes and dtypes against what it declares."""
    arguments = conditioner(task, *options).arguments()
    assert {name: (np.shape(value), value.dtype) for name, value in media.items()} == {
        name: (argument.shape, argument.dtype) for name, argument in arguments.items()
    }
    weights = vae(residual=task == "ti2v").params
    result = compiled(task, *options)(weights, **media)
    assert all(value.dtype == jnp.float32 for value in result["condition"].values())
    return {name: np.asarray(value) for name, value in result["condition"].items()}


def draw(seed: int, frames: int = FRAMES, channels: tuple[int, ...] = (3,)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, HEIGHT, WIDTH, *channels), np.uint8)


def pictures(frames: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in frames]


def reference_pipeline(kind: Any, reference: AutoencoderKLWan, **parts: Any) -> Any:
    """A pipeline that has a VAE and little else."""
    rest = dict.fromkeys(("tokenizer", "text_encoder", "scheduler", "transformer"))
    if kind is WanAnimatePipeline:
        rest |= dict.fromkeys(("image_processor", "image_encoder"))
    return kind(**rest | parts, vae=reference)


def assert_close(found: np.ndarray, expected: torch.Tensor, masks: slice) -> None:
    """Mask channels and latents each to their own size; the latents have to be of some."""
    judge = expected[0].numpy()
    assert found.shape == judge.shape
    # Fractions of 255 in another order of operations: two roundings.
    np.testing.assert_allclose(found[masks], judge[masks], rtol=0, atol=2.5e-7)
    rest = np.delete(judge, np.arange(len(judge))[masks], axis=0)
    assert rest.std() > 0.1
    assert relative_error(np.delete(found, np.arange(len(found))[masks], axis=0), rest) < TOLERANCE


@functools.cache
def expected_image_condition(last: bool, expand_timesteps: bool = False) -> torch.Tensor:
    pipeline = reference_pipeline(
        WanImageToVideoPipeline, vae(expand_timesteps).reference, expand_timesteps=expand_timesteps
    )

    def pixels(seed: int) -> torch.Tensor:
        return pipeline.video_processor.preprocess(pictures(draw(seed, 1))[0], height=HEIGHT, width=WIDTH)

    with torch.no_grad():
        return pipeline.prepare_latents(
            pixels(1),
            1,
            vae(expand_timesteps).config.z_dim,
            HEIGHT,
            WIDTH,
            FRAMES,
            torch.float32,
            torch.device("cpu"),
            torch.Generator().manual_seed(0),
            last_image=pixels(2) if last else None,
        )[1]


@pytest.mark.parametrize(
    ("task", "options", "last", "name", "masks"),
    [
        ("i2v", (2,), False, "channels", 4),
        ("flf2v", (2,), True, "channels", 4),
        ("ti2v", (), False, "first_frame", 0),
    ],
)
def test_images(task: str, options: tuple[int, ...], last: bool, name: str, masks: int) -> None:
    media = {"image": draw(1, 1), **({"last_image": draw(2, 1)} if last else {})}
    expected = expected_image_condition(last=last, expand_timesteps=task == "ti2v")
    assert_close(condition(task, media, *options)[name], expected, slice(masks))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", CHUNKS)
def test_optional_last_image(chunk: int) -> None:
    """All of the chunks; the other tasks encode with the same function."""
    media = {"image": draw(1, 1), "last_image": draw(2, 1)}
    for given, last in ((ONE, True), (NONE, False)):
        found = condition("i2v22", {**media, "has_last_image": given}, chunk)
        assert_close(found["channels"], expected_image_condition(last=last), slice(4))


def vace_media() -> _Media:
    """The mask is on in parts, in other parts of each colour, and has values next to the middle."""
    mask = draw(4)
    mask[:, :, : WIDTH // 2, 1] = 127
    mask[:, : HEIGHT // 2, :, 2] = 128
    return {"video": draw(3), "mask": mask}


def tall(seed: int) -> np.ndarray:
    """A reference image, which the reference fits into the frame by itself."""
    return np.random.default_rng(seed).integers(0, 256, (40, 24, 3), np.uint8)


@functools.cache
def expected_control(has_video: bool, references: int) -> tuple[torch.Tensor, np.ndarray | None]:
    """The reference's control, and its reference images as the program takes them."""
    transformer = WanVACETransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=12,
        text_dim=4,
        freq_dim=4,
        ffn_dim=4,
        num_layers=1,
        vace_layers=[0],
    )
    pipeline = reference_pipeline(WanVACEPipeline, vae().reference, transformer=transformer)
    media = {name: pictures(frames) for name, frames in vace_media().items()} if has_video else {}
    images = [Image.fromarray(tall(number)) for number in range(references)] or None
    with torch.no_grad():
        video, mask, canvases = pipeline.preprocess_conditions(
            media.get("video"),
            media.get("mask"),
            images,
            1,
            HEIGHT,
            WIDTH,
            FRAMES,
            torch.float32,
            torch.device("cpu"),
        )
        latents = pipeline.prepare_video_latents(video, mask, canvases, None, torch.device("cpu"))
        control = torch.cat([latents, pipeline.prepare_masks(mask, canvases)], 1)
    stacked = torch.stack(canvases[0]).permute(0, 2, 3, 1).numpy() if references else None
    return control, stacked


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("has_video", "references", "chunk"),
    [(False, 0, 2), (True, 0, 2), (False, 2, 2), (True, 2, 2)],
)
def test_control(has_video: bool, references: int, chunk: int) -> None:
    expected, images = expected_control(has_video, references)
    media: dict[str, Any] = {**vace_media(), "has_video": ONE if has_video else NONE}
    if images is not None:
        media["references"] = images
    found = condition("vace", media, chunk, FRAMES, references)["control"]
    assert found.shape[:2] == (96, references + 6)
    assert_close(found, expected, slice(32, None))


def animate_media() -> _Media:
    """Half of the mask's pixels are hard, as real ones are."""
    mask = draw(7, channels=())
    mask[:, :, ::16] = np.where(mask[:, :, ::16] > 127, 255, 0)
    return {
        "image": draw(1, 1),
        "pose_video": draw(5),
        "background_video": draw(6),
        "mask_video": mask,
        "previous": np.random.default_rng(8).uniform(-1, 1, (5, HEIGHT, WIDTH, 3)).astype(np.float32),
    }


@functools.cache
def expected_segment(mode: str, overlap: int, later: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's channels and pose."""
    pipeline = reference_pipeline(WanAnimatePipeline, vae().reference)
    media, device = animate_media(), torch.device("cpu")

    def video(name: str, processor: Any) -> torch.Tensor:
        return processor.preprocess_video(pictures(media[name]), height=HEIGHT, width=WIDTH)

    image = pipeline.vae_image_processor.preprocess(
        pictures(media["image"])[0], height=HEIGHT, width=WIDTH, resize_mode="fill"
    )
    previous = torch.from_numpy(media["previous"][-overlap:]).permute(3, 0, 1, 2)[None] if later else None
    beside = {
        "background_video": video("background_video", pipeline.video_processor),
        "mask_video": video("mask_video", pipeline.video_processor_for_mask),
    }
    with torch.no_grad():
        pose = pipeline.prepare_pose_latents(video("pose_video", pipeline.video_processor), device=device)
        character = pipeline.prepare_reference_image_latents(image, device=device)
        segment = pipeline.prepare_prev_segment_cond_latents(
            previous,
            **beside if mode == "replace" else {},
            segment_frame_length=FRAMES,
            start_frame=(FRAMES - overlap) * later,
            height=HEIGHT,
            width=WIDTH,
            prev_segment_cond_frames=overlap,
            task=mode,
            device=device,
        )
    return torch.cat([character, segment], 2), pose


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "overlap", "later", "chunk"),
    [
        *(("replace", *segment, 2) for segment in SEGMENTS),
        ("animate", *SEGMENTS[-1], 2),
    ],
)
def test_segment(mode: str, overlap: int, later: bool, chunk: int) -> None:
    flags = {"overlap": overlap, "later": later, "replace": mode == "replace"}
    media = {**animate_media(), **{name: np.int32(value) for name, value in flags.items()}}
    found = condition("animate", media, chunk)
    channels, pose = expected_segment(mode, overlap, later)
    assert_close(found["channels"], channels, slice(4))
    assert_close(found["pose"], pose, slice(0))


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["i2v22", "animate"])
def test_memory_does_not_grow_with_frames(task: str) -> None:
    """Beside inputs and outputs: a video in float32, twelve bytes a pixel, would be more than the limit."""

    def measured(*frames: int) -> tuple[int, int, int]:
        memory = compiled(task, 2, *frames).memory_analysis()
        return memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes

    more = 45
    temporary, arguments, outputs = np.subtract(measured(more), measured())
    # The loop over pieces may copy a video, in its bytes, and results are there twice while they are joined.
    assert temporary <= arguments + 3 * outputs < 0.9 * 12 * (more - FRAMES) * WIDTH * HEIGHT


KEPT = 7
"""More than a piece of one latent frame has, and than a video of two."""


def to_bytes(video: jax.Array) -> jax.Array:
    return jnp.round((video + 1) * 127.5).astype(jnp.uint8)


@functools.cache
def keeping(frames: int, chunk: int) -> Any:
    """Decoding to bytes with the last frames kept, compiled for so many latent frames of 4x6 cells."""
    decode = program(vae().module, "decode", chunk, finish=to_bytes, keep_last=KEPT)
    return decode.lower(vae().params, jax.ShapeDtypeStruct((1, 16, frames, 4, 6), np.float32)).compile()


@pytest.mark.thorough
@pytest.mark.parametrize(("frames", "chunk"), [(6, 1), (6, 2), (2, 1), (1, 2)])
def test_last_frames_are_kept(frames: int, chunk: int) -> None:
    model = vae()
    latents = model.draw_latents(frames, (4, 6))
    video, last = keeping(frames, chunk)(model.params, latents)
    expected = decoded(model.reference, latents)
    missing = max(0, KEPT - expected.shape[1])
    assert last.shape == (1, KEPT, HEIGHT, WIDTH, 3) and last.dtype == jnp.float32
    assert np.all(np.asarray(last[:, :missing]) == 0)
    assert relative_error(last[:, missing:], expected[:, -KEPT:]) < TOLERANCE
    assert video.dtype == jnp.uint8 and video.shape == expected.shape
    # Float32 noise may carry a value across the middle between two integers, in about one of 1e4.
    assert np.mean(np.asarray(video) != np.asarray(to_bytes(jnp.asarray(expected)))) < 1e-3


def test_keeping_frames_takes_no_memory_for_the_video() -> None:
    few, many = 6, 14
    temporary = [keeping(frames, 2).memory_analysis().temp_size_in_bytes for frames in (few, many)]
    # Twice the bytes while pieces are joined; in float32 the video alone would be four times.
    assert (
        temporary[1] - temporary[0] <= 2 * 4 * (many - few) * HEIGHT * WIDTH * 3 + 8 * (many - few) * 16 * 24
    )
