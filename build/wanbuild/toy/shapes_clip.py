"""Names and shapes of an image encoder's tensors, from its config.json alone.

They are those of transformers' published CLIPVisionModel, which a test checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wanbuild.models.clip_config import image_tokens
from wanbuild.toy.shapes import Shapes, affine, linear


def image_encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of a CLIPVisionModel, with the prefix of published files.

    Args:
        config: its config.json.
    """
    dim, hidden, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    shapes: Shapes = {
        "embeddings.class_embedding": (dim,),
        "embeddings.patch_embedding.weight": (dim, config["num_channels"], patch, patch),
        "embeddings.position_embedding.weight": (image_tokens(config["image_size"], patch), dim),
    }
    shapes |= affine("pre_layrnorm", dim) | affine("post_layernorm", dim)
    for layer in range(config["num_hidden_layers"]):
        block = f"encoder.layers.{layer}"
        for projection in ("q", "k", "v", "out"):
            shapes |= linear(f"{block}.self_attn.{projection}_proj", dim, dim)
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= affine(f"{block}.{norm}", dim)
        shapes |= linear(f"{block}.mlp.fc1", dim, hidden) | linear(f"{block}.mlp.fc2", hidden, dim)
    return {f"vision_model.{name}": shape for name, shape in sorted(shapes.items())}
