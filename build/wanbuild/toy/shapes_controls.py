"""Names and shapes of the tensors of transformers with control blocks or a motion encoder.

They are those of diffusers' WanVACETransformer3DModel and WanAnimateTransformer3DModel, which a test checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from wanbuild.toy.shapes import Shapes, block_shapes, conv, linear, transformer_shapes

_MOTION_LAYERS = 5
"""Linear layers after the motion encoder's convolutions; no config field states the number."""
_SMALLEST = 4
"""Pixels per side of the motion encoder's last feature map."""


def vace_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of a WanVACETransformer3DModel.

    Args:
        config: its config.json.

    Raises:
        ValueError: see ``transformer_shapes``.
    """
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    shapes = transformer_shapes(config)
    shapes |= conv("vace_patch_embedding", config["vace_in_channels"], dim, *config["patch_size"])
    shapes |= linear("vace_blocks.0.proj_in", dim, dim)
    for layer in range(len(config["vace_layers"])):
        shapes |= block_shapes(f"vace_blocks.{layer}", config)
        shapes |= linear(f"vace_blocks.{layer}.proj_out", dim, dim)
    return dict(sorted(shapes.items()))


def animate_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of a WanAnimateTransformer3DModel.

    Args:
        config: its config.json; ``motion_encoder_channel_sizes`` may be None, for the class default.

    Raises:
        ValueError: see ``transformer_shapes``.
    """
    dim, head_dim = config["num_attention_heads"] * config["attention_head_dim"], config["attention_head_dim"]
    shapes = transformer_shapes(config)
    shapes |= conv("pose_patch_embedding", config["latent_channels"], dim, *config["patch_size"])
    shapes |= _motion_encoder(config)
    shapes |= _face_encoder(config, dim)
    for adapter in range(config["num_layers"] // config["inject_face_latents_blocks"]):
        for projection in ("to_q", "to_k", "to_v", "to_out"):
            shapes |= linear(f"face_adapter.{adapter}.{projection}", dim, dim)
        for norm in ("norm_q", "norm_k"):
            shapes[f"face_adapter.{adapter}.{norm}.weight"] = (head_dim,)
    return dict(sorted(shapes.items()))


def _channels(config: Mapping[str, Any]) -> list[int]:
    """Returns the channels of the motion encoder's feature maps, from the whole face down to 4 pixels."""
    size, table = config["motion_encoder_size"], config.get("motion_encoder_channel_sizes")
    sizes = [size >> level for level in range(size.bit_length()) if size >> level >= _SMALLEST]
    if table is None:
        return [min(512, 512 * 32 // pixels) for pixels in sizes]
    return [table[str(pixels)] for pixels in sizes]


def _motion_encoder(config: Mapping[str, Any]) -> Shapes:
    """Returns the motion encoder's tensors; a convolution's bias belongs to the activation after it."""
    name, style, channels = "motion_encoder", config["motion_style_dim"], _channels(config)
    shapes: Shapes = {
        f"{name}.conv_in.weight": (channels[0], 3, 1, 1),
        f"{name}.conv_in.act_fn.bias": (channels[0],),
        f"{name}.conv_out.weight": (style, channels[-1], _SMALLEST, _SMALLEST),
        f"{name}.motion_synthesis_weight": (config["motion_encoder_dim"], config["motion_dim"]),
    }
    for number, (in_dim, out_dim) in enumerate(itertools.pairwise(channels)):
        block = f"{name}.res_blocks.{number}"
        shapes |= {
            f"{block}.conv1.weight": (in_dim, in_dim, 3, 3),
            f"{block}.conv1.act_fn.bias": (in_dim,),
            f"{block}.conv2.weight": (out_dim, in_dim, 3, 3),
            f"{block}.conv2.act_fn.bias": (out_dim,),
            f"{block}.conv_skip.weight": (out_dim, in_dim, 1, 1),
        }
    for layer in range(_MOTION_LAYERS):
        last = layer == _MOTION_LAYERS - 1
        shapes |= linear(f"{name}.motion_network.{layer}", style, config["motion_dim"] if last else style)
    return shapes


def _face_encoder(config: Mapping[str, Any], dim: int) -> Shapes:
    name, hidden = "face_encoder", config["face_encoder_hidden_dim"]
    heads = config["face_encoder_num_heads"]
    shapes = conv(f"{name}.conv1_local", config["motion_encoder_dim"], hidden * heads, 3)
    shapes |= conv(f"{name}.conv2", hidden, hidden, 3) | conv(f"{name}.conv3", hidden, hidden, 3)
    shapes |= linear(f"{name}.out_proj", hidden, dim)
    shapes[f"{name}.padding_tokens"] = (1, 1, 1, dim)
    return shapes
