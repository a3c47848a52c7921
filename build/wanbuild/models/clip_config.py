"""The fields of a CLIP image encoder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import ConfigError, Divisor, Size


def image_tokens(image_size: int, patch_size: int) -> int:
    """Returns the tokens of one image, its patches and the class token; sizes are pixels per side."""
    return (image_size // patch_size) ** 2 + 1


@dataclass(frozen=True)
class ImageEncoderConfig:
    """Config of transformers' CLIPVisionModel; field names and defaults are those of config.json.

    The published model_index.json names CLIPVisionModelWithProjection, which has one more layer and the same
    hidden states.

    transformers omits fields that have the default value, so a file without ``hidden_act`` means quick_gelu,
    the activation of OpenAI's CLIP, which differs from that of the encoder published with Wan. Raises
    ConfigError if the fields contradict each other, or the activation is neither gelu nor quick_gelu.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType({"model_type": "clip_vision_model"})
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "architectures",
            "attention_dropout",
            "chunk_size_feed_forward",
            "dropout",
            "dtype",
            "id2label",
            "initializer_factor",
            "initializer_range",
            "is_encoder_decoder",
            "label2id",
            "output_attentions",
            "output_hidden_states",
            "problem_type",
            "projection_dim",
            "return_dict",
            "torch_dtype",
        }
    )
    """projection_dim belongs to the layer that only CLIPVisionModelWithProjection has."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    num_channels: Size = 3
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: Divisor = 1e-5

    def __post_init__(self) -> None:
        problems = []
        if self.hidden_act not in ("gelu", "quick_gelu"):
            problems.append(f"hidden_act is {self.hidden_act[:80]!r}, not 'gelu' or 'quick_gelu'")
        if self.num_channels != 3:
            problems.append(f"num_channels is {self.num_channels} and images have 3")
        if self.hidden_size % self.num_attention_heads:
            problems.append(f"hidden_size {self.hidden_size} is not {self.num_attention_heads} equal heads")
        if self.patch_size > self.image_size:
            problems.append(f"patch_size {self.patch_size} is larger than image_size {self.image_size}")
        if problems:
            raise ConfigError(problems)

    @property
    def grid(self) -> int:
        """Patches along each side; pixels beyond the last whole patch are dropped, as in the reference."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        return image_tokens(self.image_size, self.patch_size)
