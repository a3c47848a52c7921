"""The fields of a Wan Animate transformer's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from wanbuild.config import MAX_SIZE, Size, shown
from wanbuild.models.transformer_config import TransformerConfig

# diffusers' class default, because published config files say null.
_CHANNEL_SIZES: Mapping[str, int] = MappingProxyType(
    {"4": 512, "8": 512, "16": 512, "32": 512, "64": 256, "128": 128, "256": 64, "512": 32, "1024": 16}
)

_SMALLEST = 4
"""Pixels per side of the motion encoder's last feature map."""


@dataclass(frozen=True)
class AnimateConfig(TransformerConfig):
    """Config of diffusers' WanAnimateTransformer3DModel: the base's fields, and those of pose and face.

    Args:
        latent_channels: channels of the pose's latents. The transformer's input is the noise, four mask
            channels and the given latents, so in_channels is twice latent_channels plus four.
        motion_encoder_channel_sizes: channels by pixels per side of the motion encoder's feature maps; the
            keys are text, as in JSON. None for the default.
        motion_encoder_size: height and width of a face, in pixels: a power of two.
        motion_style_dim: width of the motion encoder's linear layers.
        motion_dim: number of directions that a motion combines.
        motion_encoder_dim: width of a motion vector.
        face_encoder_num_heads: face tokens per latent frame, not counting one constant token.
        inject_face_latents_blocks: a face adapter follows the first of every so many blocks.

    Raises ConfigError if the fields contradict each other.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("WanAnimateTransformer3DModel",)

    in_channels: Size = 36
    image_dim: Size | None = 1280
    latent_channels: Size = 16
    # config.py can only read a bare dict, so every item is checked here.
    motion_encoder_channel_sizes: dict | None = field(default=None, hash=False)  # type: ignore[type-arg]
    motion_encoder_size: Size = 512
    motion_style_dim: Size = 512
    motion_dim: Size = 20
    motion_encoder_dim: Size = 512
    face_encoder_hidden_dim: Size = 1024
    face_encoder_num_heads: Size = 4
    inject_face_latents_blocks: Size = 5
    motion_encoder_batch_size: Size = 8

    def _problems(self) -> list[str]:
        return super()._problems() + self._channel_problems() + self._face_problems()

    def _channel_problems(self) -> list[str]:
        needed = 2 * self.latent_channels + 4
        if self.in_channels == needed:
            return []
        return [
            f"in_channels is {self.in_channels}, and latent_channels {self.latent_channels} needs {needed}"
        ]

    def _face_problems(self) -> list[str]:
        problems = []
        if self.patch_size[:1] != (1,):
            problems.append(f"patch_size is {self.patch_size}, and a pose is added to single latent frames")
        if self.num_layers % self.inject_face_latents_blocks:
            problems.append(
                f"inject_face_latents_blocks is {self.inject_face_latents_blocks},"
                f" which does not divide num_layers {self.num_layers}"
            )
        if self.motion_dim > self.motion_encoder_dim:
            problems.append(
                f"motion_dim is {self.motion_dim}, more than motion_encoder_dim {self.motion_encoder_dim}"
            )
        size = self.motion_encoder_size
        if size < _SMALLEST or size & (size - 1):
            return [*problems, f"motion_encoder_size is {size}, not a power of two from {_SMALLEST} on"]
        channels = {pixels: self._channel_table.get(str(pixels)) for pixels in self._motion_pixels}
        return problems + [
            f"motion_encoder_channel_sizes has {shown(value)} for {pixels} pixels"
            for pixels, value in channels.items()
            if type(value) is not int or not 1 <= value <= MAX_SIZE
        ]

    @property
    def _channel_table(self) -> Mapping[str, int]:
        sizes = self.motion_encoder_channel_sizes
        return _CHANNEL_SIZES if sizes is None else sizes

    @property
    def _motion_pixels(self) -> tuple[int, ...]:
        """Pixels per side of the motion encoder's feature maps; each is half of the one before."""
        first, last = self.motion_encoder_size.bit_length(), _SMALLEST.bit_length()
        return tuple(1 << (bits - 1) for bits in range(first, last - 1, -1))

    @property
    def motion_channels(self) -> tuple[int, ...]:
        """Channels of the motion encoder's feature maps, from the whole face down to 4 pixels."""
        return tuple(self._channel_table[str(pixels)] for pixels in self._motion_pixels)

    @property
    def face_positions(self) -> tuple[int, ...]:
        """The indices of the blocks that a face adapter follows."""
        return tuple(range(0, self.num_layers, self.inject_face_latents_blocks))
