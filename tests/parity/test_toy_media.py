"""Toys that take images and videos: shaped as the reference's, and what is given shows in the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from wanbuild.toy.checkpoint import write_toy
from wanbuild.toy.configs import TOY_VARIANTS

WIDTH, HEIGHT, FRAMES = 64, 48, 9

# The reference's pipelines: two steps, which take a second each.


def _image(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Smooth random colours."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def _video(seed: int) -> list[Image.Image]:
    return [_image(1000 * seed + frame, (WIDTH, HEIGHT)) for frame in range(FRAMES)]


def _mask(seed: int) -> list[Image.Image]:
    """On in random cells of 12 x 12 pixels and a little."""
    noise = np.random.default_rng(seed).integers(
        0, 2, (FRAMES, HEIGHT // 12 + 1, WIDTH // 12), dtype=np.uint8
    )
    return [Image.fromarray(255 * frame).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST) for frame in noise]


GIVEN: Mapping[str, Mapping[str, Callable[[int], Any]]] = {
    "wan2.1-i2v": {"image": _image},
    "wan2.1-flf2v": {"image": _image, "last_image": _image},
    "wan2.2-i2v": {"image": _image, "last_image": _image},
    "wan2.2-ti2v": {"image": _image},
    "wan2.1-vace": {
        "video": _video,
        "mask": _mask,
        "reference_images": lambda seed: [_image(seed), _image(seed + 50)],
        "conditioning_scale": lambda seed: [1.0, 0.5 + 0.1 * seed],
    },
    "wan2.2-animate": {
        "image": _image,
        "pose_video": _video,
        "face_video": _video,
        "background_video": _video,
        "mask_video": _mask,
    },
}
"""What is given to the pipelines, made of a seed."""


@pytest.mark.parametrize("variant", GIVEN)
def test_what_is_given_shows_in_the_result(tmp_path: Path, variant: str) -> None:
    """Each input by itself moves the latents by more than 1 % of them: parity is tested far below it."""
    write_toy(tmp_path / "toy", variant)
    name = TOY_VARIANTS[variant].index["_class_name"]
    name = "WanImageToVideoPipeline" if variant == "wan2.2-ti2v" else name
    pipeline = getattr(diffusers, name).from_pretrained(tmp_path / "toy")
    pipeline.set_progress_bar_config(disable=True)
    animate = variant == "wan2.2-animate"
    options = {"mode": "replace", "segment_frame_length": FRAMES} if animate else {"num_frames": FRAMES}

    def run(**changes: Any) -> np.ndarray:
        given = {name: make(1 + number) for number, (name, make) in enumerate(GIVEN[variant].items())}
        return pipeline(
            **{"prompt": "a cat walks on the grass", **given, **options, **changes},
            negative_prompt="blurry",
            width=WIDTH,
            height=HEIGHT,
            num_inference_steps=2,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames.numpy()

    latents = run()
    # WanAnimatePipeline denormalises them before it returns them: channels have deviations of 1.1 to 3.3.
    assert 0.5 < latents.std() < (6.0 if animate else 2.0)  # measured 1.3 to 1.5, and 4.5
    changes = [(name, make(9)) for name, make in GIVEN[variant].items()]
    if variant == "wan2.1-vace":  # their order too
        changes.append(("reference_images", GIVEN[variant]["reference_images"](3)[::-1]))
    for name, value in [*changes, ("prompt", "a red dog runs at night")]:
        moved = np.linalg.norm(run(**{name: value}) - latents) / np.linalg.norm(latents)
        assert moved > 0.01, f"{name} moves {moved}"  # measured 0.02 to 0.7
    if pipeline.config.get("image_encoder", [None])[0] is not None:
        encode = pipeline.encode_image
        pipeline.encode_image = lambda images, device: encode(images, device).flip(0)
        moved = np.linalg.norm(run() - latents) / np.linalg.norm(latents)
        # Keys have no order of their own: two images that are swapped show where they have positions.
        assert moved > 0.01 if variant == "wan2.1-flf2v" else moved == 0
        others = [_image(20), _image(21)]
        pipeline.encode_image = lambda images, device: encode(others[: _count(images)], device)
        moved = np.linalg.norm(run() - latents) / np.linalg.norm(latents)
        assert moved > 0.1, f"image tokens alone move {moved}"  # measured 0.3 to 0.5


def _count(images: Any) -> int:
    return len(images) if isinstance(images, list) else 1
