"""The fields of a Wan transformer's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import ConfigError, Divisor, Size
from wanrun.artifact.model import Chunking


@dataclass(frozen=True)
class TransformerConfig:
    """Config of diffusers' WanTransformer3DModel; field names and defaults are those of config.json.

    Three fields describe the image branch: ``image_dim`` is the width of the image encoder's tokens,
    ``added_kv_proj_dim`` the width in the blocks, and ``pos_embed_seq_len`` the number of tokens if they have
    positions, for a first and a last frame. Raises ConfigError if the fields contradict each other.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("WanTransformer3DModel",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "add_img_emb": False,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"window_size", "torch_dtype", "dtype", "model_type"})

    num_attention_heads: Size
    attention_head_dim: Size
    ffn_dim: Size
    num_layers: Size
    text_dim: Size
    in_channels: Size = 16
    out_channels: Size = 16
    freq_dim: Size = 256
    eps: Divisor = 1e-6
    patch_size: tuple[Size, Size, Size] = (1, 2, 2)
    rope_max_seq_len: Size = 1024
    image_dim: Size | None = None
    added_kv_proj_dim: Size | None = None
    pos_embed_seq_len: Size | None = None

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError(problems)

    def _problems(self) -> list[str]:
        """Returns the contradictions in the config."""
        problems = []
        width = None if self.image_dim is None else self.dim
        if self.added_kv_proj_dim != width:
            problems.append(
                f"added_kv_proj_dim is {self.added_kv_proj_dim}, and image_dim {self.image_dim} needs {width}"
            )
        if self.image_dim is None and self.pos_embed_seq_len is not None:
            problems.append(f"pos_embed_seq_len is {self.pos_embed_seq_len} and image_dim is not set")
        for name in ("attention_head_dim", "freq_dim"):  # pairs of a sine and a cosine
            if getattr(self, name) % 2:
                problems.append(f"{name} is {getattr(self, name)}, an odd number")
        return problems

    @property
    def dim(self) -> int:
        """Width of the residual stream: heads × head dimension."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def chunks(self) -> Chunking | None:
        """How a video is cut into chunks; None for a model that makes it at once."""
        return None

    @property
    def patch_volume(self) -> int:
        """Latent values per channel in one patch."""
        return math.prod(self.patch_size)

    def grid(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Returns patches along frames, rows and columns for latents of (frames, rows, columns).

        Raises ValueError if the latents are not a whole number of patches, or RoPE is not defined for them.
        """
        if any(size % patch for size, patch in zip(latent_shape, self.patch_size, strict=True)):
            raise ValueError(f"latents {latent_shape} are not whole patches of {self.patch_size}")
        t, h, w = (size // patch for size, patch in zip(latent_shape, self.patch_size, strict=True))
        if max(t, h, w) > self.rope_max_seq_len:
            raise ValueError(f"patch grid {(t, h, w)} exceeds rope_max_seq_len {self.rope_max_seq_len}")
        return t, h, w
