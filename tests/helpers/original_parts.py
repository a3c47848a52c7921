"""The names of other parts than the transformer in Wan-Video's own files, from the diffusers layout."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

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


IMAGE_LAYER = {
    "norm1": "layer_norm1",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
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


def original_image_state(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an image encoder's tensors as the original has them, from those under transformers' names.

    Queries, keys and values are one tensor, the embeddings have axes of size 1, and the text half is there.
    """
    found: dict[str, np.ndarray] = {
        "textual.norm.weight": np.ones(3, np.float32),
        "log_scale": np.ones((), np.float32),
    }
    bare = {key.removeprefix("vision_model."): value for key, value in state.items()}
    found["visual.cls_embedding"] = bare.pop("embeddings.class_embedding")[None, None]
    found["visual.pos_embedding"] = bare.pop("embeddings.position_embedding.weight")[None]
    found["visual.patch_embedding.weight"] = bare.pop("embeddings.patch_embedding.weight")
    for original, transformers in (("pre_norm", "pre_layrnorm"), ("post_norm", "post_layernorm")):
        for kind in ("weight", "bias"):
            found[f"visual.{original}.{kind}"] = bare.pop(f"{transformers}.{kind}")
    layer = 0
    while f"encoder.layers.{layer}.mlp.fc1.weight" in bare:
        ours, theirs = f"visual.transformer.{layer}", f"encoder.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [bare.pop(f"{theirs}.self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            found[f"{ours}.attn.to_qkv.{kind}"] = np.concatenate(parts)
            for original, transformers in IMAGE_LAYER.items():
                found[f"{ours}.{original}.{kind}"] = bare.pop(f"{theirs}.{transformers}.{kind}")
        layer += 1
    assert not bare, bare.keys()
    return found
