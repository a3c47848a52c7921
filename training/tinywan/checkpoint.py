"""The tiny checkpoints: which there are, what they are given with a caption, what diffusers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.yardstick import first_frame
from wanbuild.check import reference_pipeline
from wanrun import Media

FOLDER = Path(__file__).parents[2] / "artifacts" / "tiny"
TINY_VAE = FOLDER / "tiny_vae.safetensors"
"""A tiny decoder of their latents, where ``tinywan.learning.tiny_decoder`` has written one."""


def names() -> list[str]:
    """Returns the variants that have a tiny checkpoint, each the name of its folder."""
    return sorted(folder.name for folder in FOLDER.glob("wan*"))


def media(variant: str, text: str, seed: int = 0) -> Media | None:
    """Returns what a variant is given with a caption: image to video the first frame, others nothing."""
    return Media(image=first_frame(text, seed)) if variant.endswith("-i2v") else None


class Reference(reference_pipeline.Reference):
    """diffusers' pipeline of a tiny checkpoint, on the CPU.

    Args:
        variant: one of ``names``.
        dtype: torch's dtype of everything but the VAE.
    """

    def __init__(self, variant: str, dtype: str = "float32") -> None:
        super().__init__(FOLDER / variant, variant, dtype)

    def generate(
        self, text: str, num_steps: int, image_seed: int = 0, **options: Any
    ) -> reference_pipeline.Made:
        """Makes a video of (FRAMES, HEIGHT, WIDTH) with the guidance that is the variant's default.

        Args:
            text: the caption.
            num_steps: of UniPC.
            image_seed: of the first frame, if one is given.
            options: of ``run``: the seed, or latents.
        """
        return self.run(
            media(self.variant.name, text, image_seed),
            prompt=text,
            negative_prompt="",
            width=WIDTH,
            height=HEIGHT,
            num_frames=FRAMES,
            num_inference_steps=num_steps,
            guidance_scale=self.variant.guidance_scale,
            **dict[str, Any](self.variant.options),  # the second expert's guidance
            **options,
        )
