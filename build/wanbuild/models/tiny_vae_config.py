"""The config of a tiny decoder (TAEHV): what its tensors' shapes show, since its files have no config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import ConfigError, Size

STRIDES = (1, 2, 2)
"""Frames that each level makes of one."""


@dataclass(frozen=True)
class TinyVAEConfig:
    """Config of the decoder of a TAEHV: https://github.com/madebyollin/taehv.

    Args:
        latent_channels: of the latents, which it takes as the transformer makes them.
        widths: channels of the three levels, and of the frames' last convolution.
        stored_frames: frames that each level's weights could make of one; the last ``STRIDES`` are used.
        patch_size: pixels per side of the patches that the last convolution makes.

    Raises ConfigError if there are other levels.
    """

    latent_channels: Size
    widths: tuple[Size, ...] = (256, 128, 64, 64)
    stored_frames: tuple[Size, ...] = STRIDES
    patch_size: Size = 1

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("TAEHV",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    IGNORED: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        problems = []
        if len(self.widths) != len(STRIDES) + 1:
            problems.append(f"widths has {len(self.widths)} levels, not {len(STRIDES) + 1}")
        stored = zip(self.stored_frames, STRIDES, strict=False)
        if len(self.stored_frames) != len(STRIDES) or any(found < least for found, least in stored):
            problems.append(f"stored_frames is {self.stored_frames}, and {STRIDES} are needed")
        if problems:
            raise ConfigError(problems)

    @property
    def spatial(self) -> int:
        """Pixels per latent cell along height and along width."""
        return 8 * self.patch_size
