"""AnyFlow: any number of steps; and AnyFlow-FAR, which makes a video chunk by chunk, from an image too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from wanbuild.variants.conditioner import Conditioner
from wanbuild.variants.first_frame import FirstFrameConditioner
from wanbuild.variants.variant import TEXT_TO_VIDEO, Usage, Variant, an_image, takes
from wanrun.artifact.task import HeldFrame
from wanrun.media.types import Media


@dataclass(frozen=True, kw_only=True)
class FlowMap(Variant):
    """A variant of AnyFlow: guidance is in the weights, and the defaults are those of its own examples."""

    flow_map: bool = True
    solver: Literal["unipc", "flow-map", "self-forcing", "dmd"] = "flow-map"
    steps: int = 4
    guidance_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FirstChunk(FlowMap):
    """A variant whose first chunk may be given, as the latent frame of an image."""

    @property
    def conditioner(self) -> type[Conditioner]:
        return FirstFrameConditioner

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the image as a video of one frame, which diffusers' pipeline takes."""
        given = super().reference_arguments(media, numbers)
        if (image := given.pop("image", None)) is None:
            return given
        import torch

        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255)
        return {**given, "video": pixels.permute(2, 0, 1)[None, None]}

    @property
    def usages(self) -> Sequence[Usage]:
        return [("text", {"without": ("image",)}), ("image", {})]


def _parts(transformer: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the components of a checkpoint with this class of transformer."""
    parts = {"scheduler": "FlowMapEulerDiscreteScheduler", "transformer": transformer}
    own = {part: (f"diffusers.{kind}",) for part, kind in parts.items()}
    return MappingProxyType({**TEXT_TO_VIDEO, **own})


ROWS = (
    FlowMap(
        name="anyflow-wan2.1",
        task="t2v",
        pipeline_class="AnyFlowPipeline",
        components=_parts("AnyFlowTransformer3DModel"),
    ),
    FirstChunk(
        name="anyflow-far-wan2.1",
        task="ti2v",
        pipeline_class="AnyFlowFARPipeline",
        components=_parts("AnyFlowFARTransformer3DModel"),
        inputs=takes(an_image("image", required=False)),
        held=HeldFrame(condition="condition", latents="first_frame"),
    ),
)
