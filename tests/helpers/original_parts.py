"""The names that VAE and text encoder have in Wan-Video's own files, from those in the diffusers layout."""

from __future__ import annotations

import re

RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
RESIDUAL["conv_shortcut"] = "shortcut"

TEXT = {
    "0.layer_norm": "norm1",
    "0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "1.layer_norm": "norm2",
    "1.DenseReluDense.wi_0": "ffn.gate.0",
    "1.DenseReluDense.wi_1": "ffn.fc1",
    "1.DenseReluDense.wo": "ffn.fc2",
    **{f"0.SelfAttention.{letter}": f"attn.{letter}" for letter in "qkvo"},
}


def original_vae_key(key: str, resnets: int) -> str:
    """Returns a VAE's key in the original naming.

    Args:
        key: in diffusers' naming.
        resnets: residual blocks of a level of the decoder.
    """
    module, _, kind = key.rpartition(".")
    plain = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    if module in plain:
        return f"{plain[module]}.{kind}"
    half, _, rest = module.partition(".")
    ends = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
    if rest in ends:
        return f"{half}.{ends[rest]}.{kind}"
    if middle := re.fullmatch(r"mid_block\.attentions\.0\.(\w+)", rest):
        return f"{half}.middle.1.{middle[1]}.{kind}"
    if middle := re.fullmatch(r"mid_block\.resnets\.(\d)\.(\w+)", rest):
        return f"{half}.middle.{2 * int(middle[1])}.{RESIDUAL[middle[2]]}.{kind}"
    if flat := re.fullmatch(r"down_blocks\.(\d+)\.(conv1|conv2|norm1|norm2|conv_shortcut)", rest):  # 2.1
        return f"{half}.downsamples.{flat[1]}.{RESIDUAL[flat[2]]}.{kind}"
    if flat := re.fullmatch(r"down_blocks\.(\d+)\.(resample\.1|time_conv)", rest):
        return f"{half}.downsamples.{flat[1]}.{flat[2]}.{kind}"
    if flat := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.(.+)", rest):
        return f"{half}.upsamples.{int(flat[1]) * (resnets + 1) + resnets}.{flat[2]}.{kind}"
    level = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\.(.+)", rest)
    assert level is not None, key
    word, index, place, last = level.groups()
    inner = RESIDUAL.get(last, last)
    if half == "decoder" and resnets:
        return f"{half}.upsamples.{int(index) * (resnets + 1) + int(place)}.{inner}.{kind}"
    return f"{half}.{word}samples.{index}.{word}samples.{9 if place is None else place}.{inner}.{kind}"


def original_text_key(key: str) -> str:
    """Returns a text encoder's key in the original naming."""
    module, _, kind = key.rpartition(".")
    plain = {"shared": "token_embedding", "encoder.final_layer_norm": "norm"}
    if module in plain:
        return f"{plain[module]}.{kind}"
    block = re.fullmatch(r"encoder\.block\.(\d+)\.layer\.(.+)", module)
    assert block is not None, key
    return f"blocks.{block[1]}.{TEXT[block[2]]}.{kind}"
