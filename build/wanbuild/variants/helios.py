"""Helios: chunks of video from text, of one size or of growing ones. Settings are of its own scripts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from wanbuild.variants.variant import TEXT_TO_VIDEO, Variant
from wanrun.artifact.model import Pyramid


def _row(name: str, pipeline_class: str, scheduler: str, pyramid: Pyramid, **more: Any) -> Variant:
    own = {"scheduler": (f"diffusers.{scheduler}",), "transformer": ("diffusers.HeliosTransformer3DModel",)}
    return Variant(
        name=name,
        task="t2v",
        pipeline_class=pipeline_class,
        components=MappingProxyType({**TEXT_TO_VIDEO, **own}),
        pyramid=pyramid,
        flow_shift=1.0,
        fps=24,
        sizes=((640, 384),),
        num_frames=129,
        **more,
    )


ROWS = (
    _row("helios-wan2.1", "HeliosPipeline", "HeliosScheduler", Pyramid(stages=1, shift="exponential")),
    _row(
        "helios-mid-wan2.1",
        "HeliosPyramidPipeline",
        "HeliosScheduler",
        Pyramid(stages=3, shift="exponential"),
        steps=20,
    ),
    _row(
        "helios-distilled-wan2.1",
        "HeliosPyramidPipeline",
        "HeliosDMDScheduler",
        Pyramid(stages=3, shift="linear", doubled=True),
        solver="dmd",
        steps=2,
        guidance_scale=1.0,
    ),
)
