"""The tiny checkpoints: which there are, what they are given with a caption, what diffusers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.yardstick import first_frame
from wanbuild.check import reference_pipeline
from wanbuild.variants.table import variants
from wanrun import Media

FOLDER = Path(__file__).parents[2] / "artifacts" / "tiny"


def names() -> list[str]:
    """Returns the variants that have a tiny checkpoint, each the name of its folder."""
    return sorted(folder.name for folder in FOLDER.glob("wan*"))


def media(variant: str, text: str, seed: int = 0) -> Media | None:
    """Returns what a variant is given with a caption: image to video the first frame, others nothing."""
    return Media(image=first_frame(text, seed)) if variant.endswith("-i2v") else None


class Reference:
    """diffusers' pipeline of a tiny checkpoint, float32, on the CPU.

    Args:
        variant: one of ``names``.
    """

    def __init__(self, variant: str) -> None:
        self._name, self._variant = variant, variants()[variant]
        self._reference = reference_pipeline.Reference(FOLDER / variant, variant)

    def generate(self, text: str, seed: int, num_steps: int, image_seed: int = 0) -> reference_pipeline.Made:
        """Makes a video of (FRAMES, HEIGHT, WIDTH) with the guidance that is the variant's default.

        Args:
            text: the caption.
            seed: of the first noise.
            num_steps: of UniPC.
            image_seed: of the first frame, if one is given.
        """
        return self._reference.run(
            media(self._name, text, image_seed),
            seed=seed,
            prompt=text,
            negative_prompt="",
            width=WIDTH,
            height=HEIGHT,
            num_frames=FRAMES,
            num_inference_steps=num_steps,
            guidance_scale=self._variant.guidance_scale,
            **dict[str, Any](self._variant.options),  # the second expert's guidance
        )
