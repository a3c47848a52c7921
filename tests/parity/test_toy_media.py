"""Toys that take images and videos: what is given shows in what the reference makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.reference_models import relative_error
from wanbuild.check.reference_pipeline import Reference
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.media.inputs import Media
from wanrun.replay.samples import sample_mask

WIDTH, HEIGHT, FRAMES = 64, 48, 9

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def _image(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Smooth random colours."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def _video(seed: int) -> list[Image.Image]:
    return [_image(1000 * seed + frame, (WIDTH, HEIGHT)) for frame in range(FRAMES)]


def _mask(seed: int) -> list[Image.Image]:
    return sample_mask(WIDTH, HEIGHT, FRAMES)[:: -1 if seed == 9 else 1]


GIVEN: Mapping[str, Mapping[str, Callable[[int], Any]]] = {
    "wan2.1-i2v": {"image": _image},
    "wan2.1-flf2v": {"image": _image, "last_image": _image},
    "wan2.2-i2v": {"image": _image, "last_image": _image},
    "wan2.2-ti2v": {"image": _image},
    "wan2.1-vace": {
        "video": _video,
        "mask": _mask,
        "reference_image": lambda seed: (_image(seed), _image(seed + 50)),
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


@pytest.mark.thorough
@pytest.mark.parametrize("variant", GIVEN)
def test_what_is_given_shows_in_the_result(tmp_path: Path, variant: str) -> None:
    """Each input by itself moves the latents by more than 1 % of them: parity is tested far below it."""
    write_toy(tmp_path / "toy", variant)
    reference = Reference(tmp_path / "toy", variant)
    given = {name: make(1 + number) for number, (name, make) in enumerate(GIVEN[variant].items())}
    own = {"mode": "replace"} if variant == "wan2.2-animate" else {}

    def run(prompt: str = "a cat walks on the grass", scale: float = 1.0, **changes: Any) -> np.ndarray:
        made = reference.run(
            Media(**{**given, **own, **changes}),
            seed=0,
            prompt=prompt,
            negative_prompt="blurry",
            width=WIDTH,
            height=HEIGHT,
            num_frames=FRAMES,
            num_inference_steps=2,
            guidance_scale=3.0,
            **({} if scale == 1 else {"conditioning_scale": scale}),
        )
        return made.latents

    latents = run()
    assert 0.5 < latents.std() < 2.0
    changes: list[dict[str, Any]] = [{name: make(9)} for name, make in GIVEN[variant].items()]
    if variant == "wan2.1-vace":  # the order of references too
        changes += [{"reference_image": given["reference_image"][::-1]}, {"scale": 0.3}]
    for change in [*changes, {"prompt": "a red dog runs at night"}]:
        moved = relative_error(run(**change), latents)
        assert moved > 0.01, f"{[*change]} moves {moved}"  # measured 0.02 to 0.6
    pipe = reference.pipe
    if pipe.config.get("image_encoder", [None])[0] is not None:
        encode = pipe.encode_image
        pipe.encode_image = lambda images, device: encode(images, device).flip(0)
        moved = relative_error(run(), latents)
        # Keys have no order of their own: two images that are swapped show where they have positions.
        assert moved > 0.01 if variant == "wan2.1-flf2v" else moved == 0
        others = [_image(20), _image(21)]
        pipe.encode_image = lambda images, device: encode(others[: _count(images)], device)
        moved = relative_error(run(), latents)
        assert moved > 0.1, f"image tokens alone move {moved}"  # measured 0.3 to 0.4


def _count(images: Any) -> int:
    return len(images) if isinstance(images, list) else 1
