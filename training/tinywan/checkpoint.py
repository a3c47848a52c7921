"""The tiny checkpoints: which there are, what they are given with a caption, what diffusers makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.yardstick import first_frame
from wanbuild.check.reference_pipeline import load_reference, run_reference
from wanbuild.variants.table import variants
from wanrun import Media

FOLDER = Path(__file__).parents[2] / "artifacts" / "tiny"


def names() -> list[str]:
    """Returns the variants that have a tiny checkpoint, each the name of its folder."""
    return sorted(folder.name for folder in FOLDER.glob("wan*"))


def media(variant: str, text: str, seed: int = 0) -> Media | None:
    """Returns what a variant is given with a caption: image to video the first frame, others nothing."""
    return Media(image=first_frame(text, seed)) if variant.endswith("-i2v") else None


@dataclass(frozen=True)
class Video:
    """What the reference has made.

    Args:
        latents: float32 (1, 16, T, H, W), normalised.
        frames: uint8 (FRAMES, HEIGHT, WIDTH, 3), rounded to the nearest.
    """

    latents: np.ndarray
    frames: np.ndarray


class Reference:
    """diffusers' pipeline of a tiny checkpoint, float32, on the CPU.

    Args:
        variant: one of ``names``.
    """

    def __init__(self, variant: str) -> None:
        self._name, self._variant = variant, variants()[variant]
        self._pipe = load_reference(FOLDER / variant, self._variant.reference_class)

    def generate(self, text: str, seed: int, num_steps: int, image_seed: int = 0) -> Video:
        """Makes a video with the guidance that is the variant's default.

        Args:
            text: the caption.
            seed: of the first noise.
            num_steps: of UniPC.
            image_seed: of the first frame, if one is given.
        """
        import torch  # only here: naming the checkpoints needs no torch

        arguments: dict[str, Any] = {
            "prompt": text,
            "negative_prompt": "",
            "width": WIDTH,
            "height": HEIGHT,
            "num_frames": FRAMES,
            "num_inference_steps": num_steps,
            "guidance_scale": self._variant.guidance_scale,
            "generator": torch.manual_seed(seed),
            **self._variant.options,  # the second expert's guidance
        }
        if given := media(self._name, text, image_seed):
            arguments = self._variant.reference_arguments(given, arguments)
        made = run_reference(self._pipe, **arguments)
        return Video(made.latents, np.round(made.frames[0] * 255).astype(np.uint8))
