"""AnyFlow: any number of steps; and AnyFlow-FAR, which makes a video chunk by chunk, or continues one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from wanbuild.variants.conditioner import FLAG, Arrays, Conditioner, signed
from wanbuild.variants.variant import TEXT_TO_VIDEO, Usage, Variant, a_video, an_image, takes
from wanrun.artifact.task import HeldFrame
from wanrun.media.inputs import Media


@dataclass(frozen=True, kw_only=True)
class FlowMap(Variant):
    """A variant of AnyFlow: guidance is in the weights, and the defaults are those of its examples."""

    flow_map: bool = True
    solver: Literal["unipc", "flow-map", "self-forcing", "dmd"] = "flow-map"
    steps: int = 4
    guidance_scale: float = 1.0


_GIVEN, _COUNT = "given", "given_frames"


class GivenConditioner(Conditioner):
    """The first chunks: the latent frames of given ones, the rest without meaning."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``given`` uint8 (F, H, W, 3), and ``given_frames``, how many of them there are."""
        return {_GIVEN: self._frames(self.num_frames), _COUNT: FLAG}

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``latents`` (z, T, h, w)."""
        frames = {_GIVEN: media[_GIVEN]}
        (latents,) = self._encode(weights, frames, [lambda piece: signed(piece[_GIVEN])], given=media[_COUNT])
        return {"latents": latents}


@dataclass(frozen=True, kw_only=True)
class FirstChunks(FlowMap):
    """A variant whose first chunks may be given, by an image or a video."""

    sample_frames: ClassVar[int] = 13  # a video that is continued ends where a chunk ends

    @property
    def conditioner(self) -> type[Conditioner]:
        return GivenConditioner

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an image as a video of one frame: diffusers' pipeline takes a tensor (1, F, 3, H, W).

        It has the video's size, as other pipelines scale images; tensors are scaled without a filter.
        """
        given = super().reference_arguments(media, numbers)
        image = given.pop("image", None)
        if (frames := given.pop("video", image and [image])) is None:
            return given
        import torch
        from PIL.Image import Resampling

        size = numbers["width"], numbers["height"]
        sized = [np.asarray(frame.resize(size, Resampling.LANCZOS), np.float32) for frame in frames]
        pixels = torch.from_numpy(np.stack(sized) / 255)
        return {**given, "video": pixels.permute(0, 3, 1, 2)[None]}

    @property
    def usages(self) -> Sequence[Usage]:
        return [("text", {"without": ("image", "video")}), ("image", {})]


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
    FirstChunks(
        name="anyflow-far-wan2.1",
        task="ti2v",
        pipeline_class="AnyFlowFARPipeline",
        components=_parts("AnyFlowFARTransformer3DModel"),
        inputs=takes(
            image=an_image(_GIVEN, required=False, count=_COUNT),
            video=a_video(_GIVEN, required=False, count=_COUNT),
        ),
        held=HeldFrame(condition="condition", latents="latents"),
    ),
)
