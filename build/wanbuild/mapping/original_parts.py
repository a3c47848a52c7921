"""Names of VAE, text encoder and image encoder in Wan-Video's own files, and in the diffusers layout.

Sources: the state dicts of WanVAE_, Wan2_2_VAE, T5Encoder and XLMRobertaCLIP (Wan-Video/Wan2.1 and Wan2.2,
wan/modules: vae.py, vae2_2.py, t5.py, clip.py), and of AutoencoderKLWan, UMT5EncoderModel and
CLIPVisionModel. Single files of ComfyUI have the VAE under these names too, and both encoders under those of
transformers; GGUF files of text encoders have llama.cpp's names (``MODEL_ARCH.T5ENCODER`` of the package
gguf).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from wanbuild.mapping.original import Templates, diffusers_names, fused_names, listed
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS
from wanrun.errors import SourceError

_RESIDUAL: Mapping[str, str] = MappingProxyType(
    {
        "residual.0": "norm1",
        "residual.2": "conv1",
        "residual.3": "norm2",
        "residual.6": "conv2",
        "shortcut": "conv_shortcut",
    }
)
"""Modules of a residual block of the VAE: the original is a sequence with activations and dropout between."""

_VAE_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "conv1": "quant_conv",
        "conv2": "post_quant_conv",
        **{
            f"{half}.{original}": f"{half}.{diffusers}"
            for half in ("encoder", "decoder")
            for original, diffusers in (
                ("conv1", "conv_in"),
                ("head.0", "norm_out"),
                ("head.2", "conv_out"),
                ("middle.1.norm", "mid_block.attentions.0.norm"),
                ("middle.1.to_qkv", "mid_block.attentions.0.to_qkv"),
                ("middle.1.proj", "mid_block.attentions.0.proj"),
                *((f"middle.0.{one}", f"mid_block.resnets.0.{new}") for one, new in _RESIDUAL.items()),
                *((f"middle.2.{one}", f"mid_block.resnets.1.{new}") for one, new in _RESIDUAL.items()),
            )
        },
    }
)

_SAMPLE = r"resample\.1|time_conv"
_STACKED = re.compile(r"(encoder\.down|decoder\.up)samples\.(\d+)\.(?:(?:down|up)samples\.(\d+)\.)?(.+)")
"""A module of a stack: of Wan 2.1 a flat list, of 2.2 a list of blocks that are lists themselves."""

_TEXT_MODULES = (
    ("token_embedding", "token_embd", "shared"),
    ("norm", "enc.output_norm", "encoder.final_layer_norm"),
    *(
        (f"blocks.{{i}}.{original}", f"enc.blk.{{i}}.{llama}", f"encoder.block.{{i}}.layer.{transformers}")
        for original, llama, transformers in (
            ("norm1", "attn_norm", "0.layer_norm"),
            ("attn.q", "attn_q", "0.SelfAttention.q"),
            ("attn.k", "attn_k", "0.SelfAttention.k"),
            ("attn.v", "attn_v", "0.SelfAttention.v"),
            ("attn.o", "attn_o", "0.SelfAttention.o"),
            ("pos_embedding.embedding", "attn_rel_b", "0.SelfAttention.relative_attention_bias"),
            ("norm2", "ffn_norm", "1.layer_norm"),
            ("ffn.gate.0", "ffn_gate", "1.DenseReluDense.wi_0"),
            ("ffn.fc1", "ffn_up", "1.DenseReluDense.wi_1"),
            ("ffn.fc2", "ffn_down", "1.DenseReluDense.wo"),
        )
    ),
)
"""Modules of a text encoder: in the original file, in llama.cpp's GGUF files, in transformers."""

_TEXT, _LLAMA = (
    Templates((f"{row[naming]}.weight", f"{row[-1]}.weight") for row in _TEXT_MODULES) for naming in (0, 1)
)

_IMAGE_LAYER, _IMAGE_OURS = "visual.transformer.{i}", "vision_model.encoder.layers.{i}"

_IMAGE = Templates(
    [
        ("visual.cls_embedding", "vision_model.embeddings.class_embedding"),
        ("visual.pos_embedding", "vision_model.embeddings.position_embedding.weight"),
        ("visual.patch_embedding.weight", "vision_model.embeddings.patch_embedding.weight"),
        *(
            (f"{original}.{kind}", f"{transformers}.{kind}")
            for original, transformers in (
                ("visual.pre_norm", "vision_model.pre_layrnorm"),
                ("visual.post_norm", "vision_model.post_layernorm"),
                (f"{_IMAGE_LAYER}.norm1", f"{_IMAGE_OURS}.layer_norm1"),
                (f"{_IMAGE_LAYER}.attn.proj", f"{_IMAGE_OURS}.self_attn.out_proj"),
                (f"{_IMAGE_LAYER}.norm2", f"{_IMAGE_OURS}.layer_norm2"),
                (f"{_IMAGE_LAYER}.mlp.0", f"{_IMAGE_OURS}.mlp.fc1"),
                (f"{_IMAGE_LAYER}.mlp.2", f"{_IMAGE_OURS}.mlp.fc2"),
            )
            for kind in ("weight", "bias")
        ),
    ]
)

_IMAGE_FUSED = Templates(
    (
        f"{_IMAGE_LAYER}.attn.to_qkv.{kind}",
        " ".join(f"{_IMAGE_OURS}.self_attn.{letter}_proj.{kind}" for letter in "qkv"),
    )
    for kind in ("weight", "bias")
)

_IMAGE_UNUSED = ("textual.", "log_scale", "visual.head")
"""Starts of the names of parts that Wan does not use: the text half, and the pooled output's projection."""

EMBEDDED = frozenset({"spiece_model"})
"""Stored tensors of single files that are not weights: ComfyUI keeps the tokenizer with the text encoder."""


def vae_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Returns the diffusers name of each key of a VAE's file; keys that are not original stay as they are.

    Raises SourceError if only some keys are original.
    """
    names = list(keys)
    if "decoder.middle.0.residual.0.gamma" not in names:
        return {name: name for name in names}
    ends = [re.match(r"decoder\.upsamples\.(\d+)\.resample", name) for name in names]
    blocks = min((int(end[1]) for end in ends if end), default=0) + 1
    return _renamed(names, lambda name: _vae_parameter(name, blocks), where)


def _vae_parameter(name: str, blocks: int) -> str | None:
    """Returns the diffusers name of a VAE's parameter; ``blocks`` as for ``_vae_module``."""
    module, _, kind = name.rpartition(".")
    new = _vae_module(module, blocks)
    return None if new is None or kind not in ("weight", "bias", "gamma") else f"{new}.{kind}"


def _vae_module(module: str, blocks: int) -> str | None:
    """Returns the diffusers path of a VAE's module; ``blocks`` is how many of 2.1's flat list are a level."""
    if module in _VAE_MODULES:
        return _VAE_MODULES[module]
    match = _STACKED.fullmatch(module)
    if match is None:
        return None
    half, index, inner, rest = match[1], int(match[2]), match[3], match[4]
    residual, sample = _RESIDUAL.get(rest), re.fullmatch(_SAMPLE, rest) is not None
    if residual is None and not sample:
        return None
    if inner is not None:  # Wan 2.2
        place = f"resnets.{inner}.{residual}" if residual else f"{half[8:]}sampler.{rest}"
        return f"{half}_blocks.{index}.{place}"
    if half == "encoder.down":
        return f"{half}_blocks.{index}.{residual or rest}"
    level, number = divmod(index, blocks)
    place = f"resnets.{number}.{residual}" if residual else f"upsamplers.0.{rest}"
    return f"{half}_blocks.{level}.{place}"


def text_encoder_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Returns the transformers name of each key of a UMT5 encoder; arguments and errors as ``vae_names``.

    Keys in ``EMBEDDED`` are left out.
    """
    names = [key for key in keys if key not in EMBEDDED]
    if "enc.output_norm.weight" in names:
        return _renamed(names, _LLAMA.find, where, "llama.cpp")
    if "token_embedding.weight" in names:
        return _renamed(names, _TEXT.find, where)
    return {name: name for name in names}


def image_encoder_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Returns the transformers name of each key of a CLIP image encoder; arguments and errors as above.

    Keys of parts that Wan does not use are left out, and so are those of tensors that hold several of
    transformers', one after the other (``image_encoder_fused``).
    """
    names = list(keys)
    if not (fused := image_encoder_fused(names)):
        return {name: name for name in names}
    used = [name for name in names if name not in fused and not name.startswith(_IMAGE_UNUSED)]
    return _renamed(used, _IMAGE.find, where)


def image_encoder_fused(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the transformers names of queries, keys and values, by the key of the tensor of all three."""
    found = {key: _IMAGE_FUSED.find(key) for key in keys}
    return {key: tuple(names.split()) for key, names in found.items() if names is not None}


def _renamed(
    names: Iterable[str],
    find: Callable[[str], str | None],
    where: str,
    naming: str = "original Wan-Video",
) -> dict[str, str]:
    renamed = {name: find(name) for name in names}
    if unknown := [name for name, new in renamed.items() if new is None]:
        raise SourceError(
            "wrong_kind",
            f"{where} is in the {naming} naming and has keys that are not a part of this model: "
            f"{listed(unknown)}",
            remedy="use the file as published, or the repository whose name ends in -Diffusers",
        )
    return {name: new for name, new in renamed.items() if new is not None}


Names = Callable[[Iterable[str], str], dict[str, str]]
Fused = Callable[[Iterable[str]], dict[str, tuple[str, ...]]]


def _none_fused(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    return {}


NAMES: Mapping[str, tuple[Names, Fused]] = MappingProxyType(
    {
        **dict.fromkeys(TRANSFORMERS, (diffusers_names, fused_names)),
        "vae": (vae_names, _none_fused),
        TINY_VAE: (lambda keys, where: {key: key for key in keys}, _none_fused),
        "text_encoder": (text_encoder_names, _none_fused),
        "image_encoder": (image_encoder_names, image_encoder_fused),
    }
)
"""By component, a function for the name of each key, and one for the names of a fused tensor's parts."""
