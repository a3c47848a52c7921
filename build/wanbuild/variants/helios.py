"""Helios: chunks of one size or of growing ones, from text or after an image or a video.

Settings are those of Helios's scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.models.helios import PAST
from wanbuild.variants.from_video import goes_on_after
from wanbuild.variants.variant import TEXT_TO_VIDEO, Usage, Variant
from wanrun.artifact.model import Pyramid


@dataclass(frozen=True, kw_only=True)
class Helios(Variant):
    """A variant of Helios."""

    sample_frames: ClassVar[int] = 33  # a chunk

    @property
    def usages(self) -> Sequence[Usage]:
        return [("text", {"without": ("image", "video")}), ("video", {"without": ("image",)}), ("image", {})]


def _row(name: str, pipeline_class: str, scheduler: str, pyramid: Pyramid, **more: Any) -> Helios:
    own = {"scheduler": (f"diffusers.{scheduler}",), "transformer": ("diffusers.HeliosTransformer3DModel",)}
    return Helios(
        name=name,
        task="ti2v",
        pipeline_class=pipeline_class,
        components=MappingProxyType({**TEXT_TO_VIDEO, **own}),
        inputs=goes_on_after(PAST),
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
