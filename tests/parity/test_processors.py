"""Reading and preprocessing against diffusers and transformers: uint8 exactly, floats within 1e-6."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.wan.image_processor import WanAnimateImageProcessor
from diffusers.pipelines.wan.pipeline_wan_animate import CLIPImageProcessor, WanAnimatePipeline
from diffusers.pipelines.wan.pipeline_wan_vace import WanVACEPipeline
from diffusers.utils import load_image, load_video
from diffusers.video_processor import VideoProcessor
from msgspec import structs
from PIL import Image

from helpers.pictures import (
    TRANSPARENT,
    ffmpeg,
    picture,
    pictures,
    pixels,
    with_transparent_colour,
    write_variable,
    write_video,
)
from wanbuild.source.image_processor import ImageProcessorConfig
from wanrun.errors import UsageError
from wanrun.media.images import read_image
from wanrun.media.processors import (
    clip_pixels,
    cropped,
    filled,
    greyscale,
    reference_canvas,
    resized,
    scaled_size,
)
from wanrun.media.read_video import read_video
from wanrun.media.windows import reflected

# Landscape, portrait, odd sides, the size itself, much larger, much smaller, all but one row.
SIZES = [
    (97, 61),
    (61, 97),
    (96, 64),
    (64, 96),
    (333, 251),
    (251, 700),
    (19, 13),
    (9, 17),
    (64, 500),
    (400, 8),
]
PROFILES = [(96, 64), (64, 96), (80, 80)]


def as_uint8(tensor: torch.Tensor, low: float) -> np.ndarray:
    """(…, C, H, W) in [low, 1], which came from uint8, as uint8 (…, H, W, C); C is left out where it is 1."""
    scaled = (tensor.double() - low) / (1 - low) * 255
    rounded = scaled.round()
    assert (scaled - rounded).abs().max() < 1e-3
    array = rounded.movedim(-3, -1).numpy().astype(np.uint8)
    return array[..., 0] if array.shape[-1] == 1 else array


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("size", SIZES)
def test_resized_filled_and_greyscale(size: tuple[int, int], profile: tuple[int, int]) -> None:
    image, (width, height) = picture(*size), profile
    reference = VideoProcessor(vae_scale_factor=8)
    found = as_uint8(reference.preprocess(image, height=height, width=width), -1)[0]
    np.testing.assert_array_equal(resized(image, width, height), found)

    found = as_uint8(reference.preprocess(image, height=height, width=width, resize_mode="crop"), -1)[0]
    np.testing.assert_array_equal(cropped(image, width, height), found)

    reference = VideoProcessor(vae_scale_factor=8, do_normalize=False, do_convert_grayscale=True)
    found = as_uint8(reference.preprocess_video([image], height=height, width=width).transpose(1, 2), 0)[0, 0]
    np.testing.assert_array_equal(greyscale(resized(image, width, height)), found)

    # Made as WanAnimatePipeline does.
    reference = WanAnimateImageProcessor(
        vae_scale_factor=8, spatial_patch_size=(2, 2), resample="bilinear", fill_color=0
    )
    found = as_uint8(reference.preprocess(image, height=height, width=width, resize_mode="fill"), -1)[0]
    np.testing.assert_array_equal(filled(image, width, height), found)


def test_the_fill_is_lanczos() -> None:
    """WanAnimatePipeline asks for bilinear, which is overwritten: a release may mend that."""
    processor = WanAnimateImageProcessor(resample="bilinear", fill_color=0)
    assert (processor.config.resample, processor.config.fill_color) == ("lanczos", 0)


PUBLISHED = ImageProcessorConfig().record


@pytest.mark.parametrize("edges", [(224, 224), (32, 32), (33, 32), (32, 31), (30, 45), (31, 46)])
def test_clip_pixels(edges: tuple[int, int], tmp_path: Path) -> None:
    """Also a crop that is larger than the picture, and one that is odd where the picture is even."""
    edge, crop = edges
    CLIPImageProcessor(
        size={"shortest_edge": edge}, crop_size={"height": crop, "width": crop}
    ).save_pretrained(tmp_path)
    reference = CLIPImageProcessor.from_pretrained(tmp_path)
    assert reference.backend == "pil"  # what transformers falls back to without torchvision
    settings = structs.replace(PUBLISHED, shortest_edge=edge, crop=crop)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    expected = reference(images=images, return_tensors="pt")["pixel_values"].movedim(1, -1).numpy()
    found = clip_pixels(images, settings)
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_a_transparent_colour_is_white_for_clip_alone(kind: str, tmp_path: Path) -> None:
    """From the file on: what the encoder of images, the VAE and Animate's VAE are given."""
    path = with_transparent_colour(kind, tmp_path / "picture")
    ours = read_image(path, "image")
    with Image.open(path) as image:  # by its name the reference leaves it open
        theirs = load_image(image)
    assert theirs.info.get("transparency") is not None
    expected = CLIPImageProcessor()(images=[theirs], return_tensors="pt")["pixel_values"]
    found = clip_pixels([ours], PUBLISHED)
    np.testing.assert_allclose(found, expected.movedim(1, -1).numpy(), rtol=0, atol=1e-6)
    ours.info.clear()
    assert np.abs(clip_pixels([ours], PUBLISHED) - found).max() > 0.1
    vae = VideoProcessor(vae_scale_factor=8).preprocess(theirs, height=64, width=96)
    np.testing.assert_array_equal(resized(ours, 96, 64), as_uint8(vae, -1)[0])
    animate = WanAnimateImageProcessor(fill_color=0)
    vae = animate.preprocess(theirs, height=64, width=96, resize_mode="fill")
    np.testing.assert_array_equal(filled(ours, 96, 64), as_uint8(vae, -1)[0])


def vace(width: int, height: int, **conditions: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """WanVACEPipeline's preprocess_conditions: video, mask and reference images."""
    transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, 2, 2)))
    pipeline = SimpleNamespace(
        vae_scale_factor_spatial=8,
        transformer=transformer,
        video_processor=VideoProcessor(vae_scale_factor=8),
    )
    return WanVACEPipeline.preprocess_conditions(
        pipeline, **conditions, width=width, height=height, num_frames=5, dtype=torch.float32
    )


@pytest.mark.parametrize("profile", [*PROFILES, (832, 480)])
@pytest.mark.parametrize("size", [*SIZES, (1284, 727)])
def test_reference_canvas(size: tuple[int, int], profile: tuple[int, int]) -> None:
    image = picture(*size)
    (expected,) = vace(*profile, reference_images=image)[2][0]
    found = reference_canvas(image, *profile)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.movedim(0, -1).numpy(), rtol=0, atol=1e-6)


def test_vace_video_and_mask() -> None:
    video, mask = pictures(5, 224, 150), pictures(5, 61, 97, 9)
    assert scaled_size(224, 150, 96, 64, 16) == (96, 48)
    expected_video, expected_mask, _ = vace(96, 64, video=video, mask=mask)
    frames = np.stack([resized(frame, 96, 48) for frame in video])
    np.testing.assert_array_equal(frames, as_uint8(expected_video[0].transpose(0, 1), -1))
    frames = np.stack([resized(frame, 96, 48) for frame in mask])
    np.testing.assert_array_equal(frames, as_uint8(expected_mask[0].transpose(0, 1), 0))


def test_scaled_sizes() -> None:
    random = np.random.default_rng(0)
    sizes = [(832, 480), (1280, 720), (1664, 960), (833, 485), (16, 2000), (96, 64), (100, 70), (48, 96)]
    sizes += [tuple(map(int, random.integers(16, 300, 2))) for _ in range(40)]
    checked = 0
    for width, height in sizes:
        for profile in PROFILES:
            found = scaled_size(width, height, *profile, 16)
            if 0 in found:
                continue
            video, _, _ = vace(*profile, video=[Image.new("RGB", (width, height))])
            assert found == (video.shape[-1], video.shape[-2])
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("frames", [2, 3, 7])
def test_padding(frames: int) -> None:
    for target in range(1, 30):
        expected = WanAnimatePipeline.pad_video_frames(None, list(range(frames)), target)
        assert reflected(frames, target) == expected


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_images_are_read_as_by_load_image(mode: str, orientation: int, tmp_path: Path) -> None:
    image = Image.fromarray(pixels(50, 34, channels=4)).convert("RGB" if mode == "CMYK" else "RGBA")
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    image.convert(mode).save(path, exif=exif.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of palettes with transparency
        expected = load_image(str(path))
    np.testing.assert_array_equal(read_image(path, "image"), expected)


def test_deep_greyscale_would_be_clipped(tmp_path: Path) -> None:
    """Why it is refused: the reference makes all above 255 white."""
    deep = np.random.default_rng(0).integers(0, 65536, (12, 20), np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(
        np.asarray(load_image(str(tmp_path / "deep.png")))[..., 0], deep.clip(0, 255)
    )
    with pytest.raises(UsageError, match="8 bits"):
        read_image(tmp_path / "deep.png", "image")


def loaded(path: Path) -> list[Image.Image]:
    """What load_video gives; it leaves files open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        # JAX's, where it was used before: imageio starts ffmpeg by a fork.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        frames = load_video(str(path))
        gc.collect()
    return frames


def compare_video(path: Path) -> int:
    expected, found = loaded(path), list(read_video(path, "video"))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return len(found)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [("-pix_fmt", "yuv420p"), ("-c:v", "libx264", "-pix_fmt", "yuv420p10le")])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_videos_are_read_as_by_load_video(suffix: str, options: tuple[str, ...], tmp_path: Path) -> None:
    path = write_video(pictures(7, 66, 50), tmp_path / f"video.{suffix}", *options)
    assert compare_video(path) == 7


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [[0.05, 0.1, 0.2, 0.033, 0.4, 0.1], [1.0, 0.04, 0.04, 0.04, 0.5, 0.04]])
def test_a_variable_rate_is_read_as_by_load_video(seconds: list[float], tmp_path: Path) -> None:
    path = write_variable(pictures(6, 66, 50), tmp_path / "variable.mp4", seconds)
    assert compare_video(path) != 6  # frames are repeated or dropped


@pytest.mark.thorough
@pytest.mark.parametrize("angle", ["90", "180"])
def test_a_rotated_video_is_read_as_by_load_video(angle: str, tmp_path: Path) -> None:
    upright = write_video(pictures(4, 66, 50), tmp_path / "upright.mp4")
    ffmpeg("-display_rotation", angle, "-i", upright, "-c", "copy", tmp_path / "rotated.mp4")
    assert compare_video(tmp_path / "rotated.mp4") == 4
    expected = (50, 66) if angle == "90" else (66, 50)
    assert next(read_video(tmp_path / "rotated.mp4", "video")).size == expected


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", ["webp", "png"])
def test_animations_are_read_as_by_load_video(suffix: str, tmp_path: Path) -> None:
    first, *rest = pictures(4, 50, 34)
    first.save(tmp_path / f"animated.{suffix}", save_all=True, append_images=rest, duration=50)
    assert compare_video(tmp_path / f"animated.{suffix}") == 4


def test_gifs_are_read_as_by_load_video(tmp_path: Path) -> None:
    """The reference leaves palettes in them, and then fails; in colour they are the same."""
    first, *rest = pictures(4, 50, 34)
    first.save(tmp_path / "animated.gif", save_all=True, append_images=rest, duration=50)
    expected = loaded(tmp_path / "animated.gif")
    found = read_video(tmp_path / "animated.gif", "video")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other.convert("RGB")))


def test_the_judge() -> None:
    assert diffusers.__version__ == "0.42.1"
