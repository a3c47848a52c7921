"""The configs of the Wan VAE of 2.1 and of 2.2 TI2V, and of a tiny decoder.

The VAE's is the checkpoint's vae/config.json. A tiny decoder (TAEHV) has none: its tensors' shapes show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import ConfigError, Divisor, Index, Number, Size

# diffusers' class defaults, because published config files omit both lists.
_LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
_LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

MAX_RES_BLOCKS = 16
"""Limit on residual blocks: each is a module, so a config that names millions would stall the builder."""


@dataclass(frozen=True)
class VAEConfig:
    """Config of diffusers' AutoencoderKLWan: Wan 2.1's form, or Wan 2.2 TI2V's residual form on patches.

    Args:
        base_dim: channels of the encoder's first level.
        decoder_base_dim: channels of the decoder's last level; None for base_dim.
        z_dim: latent channels.
        dim_mult: channels of each level, in units of the base.
        num_res_blocks: residual blocks per encoder level; the decoder has one more.
        temperal_downsample: whether time is halved after each encoder level but the last (the checkpoints'
            spelling).
        is_residual: whether whole levels have shortcuts.
        patch_size: pixels per side of the patches that become channels of the encoder and decoder; 2 if
            residual, else None.
        in_channels, out_channels: 3 per pixel of a patch.
        scale_factor_spatial: pixels per latent cell along height and along width.
        latents_mean, latents_std: per channel, with which programs denormalise latents.

    Raises ConfigError if the lists contradict each other.
    """

    base_dim: Size = 96
    decoder_base_dim: Size | None = None
    z_dim: Size = 16
    dim_mult: tuple[Index, ...] = (1, 2, 4, 4)
    num_res_blocks: Size = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    patch_size: Size | None = None
    in_channels: Size = 3
    out_channels: Size = 3
    scale_factor_spatial: Size = 8
    latents_mean: tuple[Number, ...] = _LATENTS_MEAN
    latents_std: tuple[Divisor, ...] = _LATENTS_STD

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("AutoencoderKLWan",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "attn_scales": [],
            "scale_factor_temporal": 4,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"dropout", "clip_output"})
    """The published 2.2 file has clip_output, which the reference does not read: it always clips."""

    def __post_init__(self) -> None:
        problems = []
        if self.num_res_blocks > MAX_RES_BLOCKS:
            problems.append(f"num_res_blocks is {self.num_res_blocks}, more than {MAX_RES_BLOCKS}")
        if len(self.dim_mult) != 4:
            problems.append(f"dim_mult has {len(self.dim_mult)} levels, 8x in space needs 4")
        if len(self.temperal_downsample) != 3 or sum(self.temperal_downsample) != 2:
            problems.append(
                f"temperal_downsample is {self.temperal_downsample}, 4x in time needs two of three"
            )
        problems += self._patch_problems()
        if min(self.dim_mult, default=1) < 1:
            problems.append(f"dim_mult is {self.dim_mult}, a level without channels")
        if self.is_residual and not problems:
            problems += self._shortcut_problems()
        for name, values in (("latents_mean", self.latents_mean), ("latents_std", self.latents_std)):
            if len(values) != self.z_dim:
                problems.append(f"{name} has {len(values)} values for z_dim {self.z_dim}")
        if problems:
            raise ConfigError(problems)

    def _patch_problems(self) -> list[str]:
        """Returns the differences from both published forms."""
        patch = 2 if self.is_residual else None
        if self.patch_size != patch:
            return [f"patch_size is {self.patch_size} where is_residual {self.is_residual} needs {patch}"]
        channels = 3 * (patch or 1) ** 2
        expected = {"in_channels": channels, "out_channels": channels, "scale_factor_spatial": self.spatial}
        return [
            f"{name} is {getattr(self, name)} where patch_size {patch} needs {value}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]

    def _shortcut_problems(self) -> list[str]:
        """Checks that every shortcut averages groups of equal size, or repeats all values equally often."""
        factors = [
            8 if temporal else 4 for temporal in self.temperal_downsample
        ]  # input pixels per output pixel
        down = zip([1, *self.dim_mult], self.dim_mult, [*factors, 1], strict=False)
        up_dims = [self.dim_mult[-1], *reversed(self.dim_mult)]
        up = zip(up_dims, up_dims[1:], reversed(factors), strict=False)
        problems = [
            f"dim_mult: a shortcut of the encoder cannot average {before * factor} to {after}"
            for before, after, factor in down
            if before * factor % after
        ]
        return problems + [
            f"dim_mult: a shortcut of the decoder cannot repeat {before} to {after * factor}"
            for before, after, factor in up
            if after * factor % before
        ]

    @property
    def spatial(self) -> int:
        """Pixels per latent cell along height and along width."""
        return 8 * (self.patch_size or 1)

    @property
    def decoder_dim(self) -> int:
        """Channels of the decoder's last level."""
        return self.base_dim if self.decoder_base_dim is None else self.decoder_base_dim


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
