"""Names and shapes of a checkpoint's tensors, from the components' config.json alone.

They are those of the reference classes' state dicts (WanTransformer3DModel, AutoencoderKLWan of diffusers,
UMT5EncoderModel of transformers), which a test checks for small and published configs. Transformers with
control blocks or a motion encoder are in ``shapes_controls``, image encoders in ``shapes_clip``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def linear(name: str, in_dim: int, out_dim: int) -> Shapes:
    """Returns weight and bias of a linear layer."""
    return {f"{name}.weight": (out_dim, in_dim), f"{name}.bias": (out_dim,)}


def conv(name: str, in_dim: int, out_dim: int, *kernel: int) -> Shapes:
    """Returns weight and bias of a convolution."""
    return {f"{name}.weight": (out_dim, in_dim, *kernel), f"{name}.bias": (out_dim,)}


def affine(name: str, dim: int) -> Shapes:
    """Returns weight and bias of a norm."""
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def _refuse(config: Mapping[str, Any], **unset: Any) -> None:
    for name, value in unset.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} = {config[name]!r}: only {value!r} has known shapes")


def block_shapes(block: str, config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of one transformer block: self-attention, cross-attention, feed-forward.

    Args:
        block: its name, e.g. ``blocks.0``.
        config: the transformer's config.json.
    """
    dim, ffn = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    shapes: Shapes = {f"{block}.scale_shift_table": (1, 6, dim)}
    for attention in ("attn1", "attn2"):
        for projection in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= linear(f"{block}.{attention}.{projection}", dim, dim)
        for norm in ("norm_q", "norm_k"):
            shapes[f"{block}.{attention}.{norm}.weight"] = (dim,)
    if added := config.get("added_kv_proj_dim"):
        for projection in ("add_k_proj", "add_v_proj"):
            shapes |= linear(f"{block}.attn2.{projection}", added, dim)
        shapes[f"{block}.attn2.norm_added_k.weight"] = (dim,)
    shapes |= affine(f"{block}.norm2", dim)
    shapes |= linear(f"{block}.ffn.net.0.proj", dim, ffn)
    return shapes | linear(f"{block}.ffn.net.2", ffn, dim)


def _image_embedder(config: Mapping[str, Any], dim: int) -> Shapes:
    name, image = "condition_embedder.image_embedder", config["image_dim"]
    shapes = affine(f"{name}.norm1", image) | affine(f"{name}.norm2", dim)
    shapes |= linear(f"{name}.ff.net.0.proj", image, image) | linear(f"{name}.ff.net.2", image, dim)
    if positions := config.get("pos_embed_seq_len"):
        shapes[f"{name}.pos_embed"] = (1, positions, image)
    return shapes


def transformer_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of a WanTransformer3DModel, with or without image tokens.

    Args:
        config: its config.json.

    Raises:
        ValueError: if it has no cross-attention norm.
    """
    _refuse(config, cross_attn_norm=True)
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    patch = tuple(config["patch_size"])
    shapes: Shapes = {"scale_shift_table": (1, 2, dim)}
    shapes |= conv("patch_embedding", config["in_channels"], dim, *patch)
    shapes |= linear("proj_out", dim, config["out_channels"] * math.prod(patch))
    embedder = "condition_embedder"
    shapes |= linear(f"{embedder}.time_embedder.linear_1", config["freq_dim"], dim)
    shapes |= linear(f"{embedder}.time_embedder.linear_2", dim, dim)
    shapes |= linear(f"{embedder}.time_proj", dim, 6 * dim)
    shapes |= linear(f"{embedder}.text_embedder.linear_1", config["text_dim"], dim)
    shapes |= linear(f"{embedder}.text_embedder.linear_2", dim, dim)
    if config.get("image_dim"):
        shapes |= _image_embedder(config, dim)
    for layer in range(config["num_layers"]):
        shapes |= block_shapes(f"blocks.{layer}", config)
    return dict(sorted(shapes.items()))


def _residual(name: str, in_dim: int, out_dim: int) -> Shapes:
    shapes: Shapes = {f"{name}.norm1.gamma": (in_dim, 1, 1, 1), f"{name}.norm2.gamma": (out_dim, 1, 1, 1)}
    shapes |= conv(f"{name}.conv1", in_dim, out_dim, 3, 3, 3)
    shapes |= conv(f"{name}.conv2", out_dim, out_dim, 3, 3, 3)
    if in_dim != out_dim:
        shapes |= conv(f"{name}.conv_shortcut", in_dim, out_dim, 1, 1, 1)
    return shapes


def _mid_block(name: str, dim: int) -> Shapes:
    attention = f"{name}.attentions.0"
    shapes = _residual(f"{name}.resnets.0", dim, dim) | _residual(f"{name}.resnets.1", dim, dim)
    shapes[f"{attention}.norm.gamma"] = (dim, 1, 1)
    shapes |= conv(f"{attention}.to_qkv", dim, 3 * dim, 1, 1)
    shapes |= conv(f"{attention}.proj", dim, dim, 1, 1)
    return shapes


def _stages(channels: list[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Yields (stage, channels in, channels out, whether it is the last)."""
    for stage, (in_dim, out_dim) in enumerate(itertools.pairwise(channels)):
        yield stage, in_dim, out_dim, stage == len(channels) - 2


def _resample(name: str, in_dim: int, out_dim: int, time_dim: int | None) -> Shapes:
    """Returns a resampling module; time_dim is the output width of its convolution along time, if any."""
    shapes = conv(f"{name}.resample.1", in_dim, out_dim, 3, 3)
    return shapes if time_dim is None else shapes | conv(f"{name}.time_conv", in_dim, time_dim, 3, 1, 1)


def _encoder(config: Mapping[str, Any]) -> Shapes:
    base, mult, residual = config["base_dim"], config["dim_mult"], config.get("is_residual", False)
    channels = [base * factor for factor in [1, *mult]]
    shapes = conv("encoder.conv_in", config.get("in_channels", 3), base, 3, 3, 3)
    index = 0  # residual and resampling blocks share one list, except in the form with blocks per level
    for stage, in_dim, out_dim, last in _stages(channels):
        for resnet in range(config["num_res_blocks"]):
            block = f"{stage}.resnets.{resnet}" if residual else f"{index}"
            shapes |= _residual(f"encoder.down_blocks.{block}", in_dim, out_dim)
            in_dim, index = out_dim, index + 1
        if not last:
            block = f"{stage}.downsampler" if residual else f"{index}"
            time_dim = out_dim if config["temperal_downsample"][stage] else None
            shapes |= _resample(f"encoder.down_blocks.{block}", out_dim, out_dim, time_dim)
            index += 1
    shapes |= _mid_block("encoder.mid_block", channels[-1])
    shapes["encoder.norm_out.gamma"] = (channels[-1], 1, 1, 1)
    return shapes | conv("encoder.conv_out", channels[-1], 2 * config["z_dim"], 3, 3, 3)


def _decoder(config: Mapping[str, Any]) -> Shapes:
    base, residual = config.get("decoder_base_dim") or config["base_dim"], config.get("is_residual", False)
    mult = config["dim_mult"][::-1]
    channels = [base * factor for factor in [mult[0], *mult]]
    temporal = config["temperal_downsample"][::-1]
    shapes = conv("decoder.conv_in", config["z_dim"], channels[0], 3, 3, 3)
    shapes |= _mid_block("decoder.mid_block", channels[0])
    for stage, in_dim, out_dim, last in _stages(channels):
        block = f"decoder.up_blocks.{stage}"
        # The previous stage's upsampler halves the channels, except where a shortcut surrounds it.
        current = in_dim if residual or stage == 0 else in_dim // 2
        for resnet in range(config["num_res_blocks"] + 1):
            shapes |= _residual(f"{block}.resnets.{resnet}", current, out_dim)
            current = out_dim
        if not last:
            upsampler = f"{block}.upsampler" if residual else f"{block}.upsamplers.0"
            time_dim = 2 * out_dim if temporal[stage] else None
            shapes |= _resample(upsampler, out_dim, out_dim if residual else out_dim // 2, time_dim)
    shapes["decoder.norm_out.gamma"] = (channels[-1], 1, 1, 1)
    return shapes | conv("decoder.conv_out", channels[-1], config.get("out_channels", 3), 3, 3, 3)


def vae_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of an AutoencoderKLWan, residual (Wan 2.2 TI2V) or not.

    Args:
        config: its config.json.

    Raises:
        ValueError: if it has attention between stages.
    """
    _refuse(config, attn_scales=[])
    z = config["z_dim"]
    shapes = _encoder(config) | _decoder(config)
    shapes |= conv("quant_conv", 2 * z, 2 * z, 1, 1, 1)
    shapes |= conv("post_quant_conv", z, z, 1, 1, 1)
    return dict(sorted(shapes.items()))


def text_encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the tensors of a saved UMT5EncoderModel: ``shared.weight`` is the tied embedding.

    Args:
        config: its config.json.

    Raises:
        ValueError: if the feed-forward part is not gated.
    """
    _refuse(config, feed_forward_proj="gated-gelu")
    dim, ffn, heads = config["d_model"], config["d_ff"], config["num_heads"]
    inner = heads * config["d_kv"]
    shapes: Shapes = {"shared.weight": (config["vocab_size"], dim), "encoder.final_layer_norm.weight": (dim,)}
    for layer in range(config["num_layers"]):
        attention, feed_forward = (f"encoder.block.{layer}.layer.{part}" for part in (0, 1))
        shapes[f"{attention}.layer_norm.weight"] = shapes[f"{feed_forward}.layer_norm.weight"] = (dim,)
        for projection in "qkv":
            shapes[f"{attention}.SelfAttention.{projection}.weight"] = (inner, dim)
        shapes[f"{attention}.SelfAttention.o.weight"] = (dim, inner)
        shapes[f"{attention}.SelfAttention.relative_attention_bias.weight"] = (
            config["relative_attention_num_buckets"],
            heads,
        )
        for gate in ("wi_0", "wi_1"):
            shapes[f"{feed_forward}.DenseReluDense.{gate}.weight"] = (ffn, dim)
        shapes[f"{feed_forward}.DenseReluDense.wo.weight"] = (dim, ffn)
    return dict(sorted(shapes.items()))
