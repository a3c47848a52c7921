"""Derives the config of a component that is a single file, from the shapes of its tensors.

Facts that shapes do not show are as published: the sizes of heads, the levels of the VAE, the activation. A
file with other levels has other shapes than such a config needs, and the mapping refuses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from wanbuild.mapping.vae_rules import BLOCKS, CONV_IN, CONV_OUT, LEVELS, block_name, grow_name
from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER, PUBLISHED_VAE_2_2, PUBLISHED_VAE_IN_A14B
from wanbuild.published.variant_configs import PUBLISHED_IMAGE_ENCODER, PUBLISHED_MODELS
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.original_config import Shapes, derive_config, fields_of_transformer, layers
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS
from wanrun.errors import SourceError

_IMAGE_HEAD = PUBLISHED_IMAGE_ENCODER["hidden_size"] // PUBLISHED_IMAGE_ENCODER["num_attention_heads"]

_OF_TRANSFORMERS: Mapping[str, str] = MappingProxyType(
    {
        "vace_patch_embedding.weight": "WanVACETransformer3DModel",
        "face_encoder.padding_tokens": "WanAnimateTransformer3DModel",
        "far_patch_embedding.weight": "AnyFlowFARTransformer3DModel",
        "condition_embedder.delta_embedder.linear_1.weight": "AnyFlowTransformer3DModel",
        "patch_long.weight": "HeliosTransformer3DModel",
        "blocks.0.attn1.to_q.weight": "WanTransformer3DModel",
    }
)
"""The class of a transformer by a tensor that only it has, the most special first."""

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "vae": "AutoencoderKLWan",
        TINY_VAE: "TAEHV",
        "text_encoder": "UMT5EncoderModel",
        "image_encoder": "CLIPVisionModel",
    }
)


def class_of(name: str, shapes: Shapes, where: str) -> str:
    """Returns the class of a component, as in a model_index.json.

    ``shapes`` is by diffusers' and transformers' key. Raises SourceError if they are not such a component's.
    """
    if name not in TRANSFORMERS:
        return _OTHERS[name]
    found = next((name for key, name in _OF_TRANSFORMERS.items() if key in shapes), None)
    if found is None:
        raise _no_part(name, where, "no blocks.0.attn1.to_q.weight")
    return found


def derived_config(name: str, shapes: Shapes, where: str) -> dict[str, Any]:
    """Returns a component's config.json; ``shapes`` is by diffusers' and transformers' key.

    Raises SourceError if tensors are missing, so that the file is not such a component.
    """
    if name in TRANSFORMERS:
        class_name = class_of(name, shapes, where)
        own = _OWN.get(class_name)
        config = derive_config(class_name if own is None else "WanTransformer3DModel", shapes, where)
        return config if own is None else {**config, **own(shapes), "_class_name": class_name}
    shown = shown_fields(name, shapes, where)
    if name == "vae":
        return {**(PUBLISHED_VAE_2_2 if "decoder_base_dim" in shown else PUBLISHED_VAE_IN_A14B), **shown}
    if name == TINY_VAE:
        return shown
    if name == "text_encoder":
        return {**PUBLISHED_TEXT_ENCODER, "num_decoder_layers": shown["num_layers"], **shown}
    heads, rest = divmod(shown["hidden_size"], _IMAGE_HEAD)
    if rest:
        raise _no_part(
            name, where, f"{shown['hidden_size']} channels, which are not whole heads of {_IMAGE_HEAD}"
        )
    return {**PUBLISHED_IMAGE_ENCODER, "num_attention_heads": heads, **shown}


_ALIKE: Mapping[str, str] = MappingProxyType({"CausalWanTransformer3DModel": "WanTransformer3DModel"})
"""The classes of transformers that have the tensors of another class."""


def classes_of(class_name: str) -> tuple[str, ...]:
    """Returns a class, and the others that its tensors may be of."""
    return (class_name, *(one for one, other in _ALIKE.items() if other == class_name))


def as_class(class_name: str, config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Returns a transformer's config as one of another class, ``class_name``.

    Fields that only this class has, and the config does not, are as published. ``shapes`` is by diffusers'
    key.
    """
    own = _OWN[class_name](shapes) if class_name in _OWN else {}
    return {**own, **config, "_class_name": class_name}


def shown_fields(name: str, shapes: Shapes, where: str) -> dict[str, Any]:
    """Returns the fields of a component's config.json that its shapes show; raises as ``derived_config``.

    A transformer's ``num_attention_heads`` and ``attention_head_dim`` are not among them: shapes show only
    their product.
    """
    try:
        return (fields_of_transformer if name in TRANSFORMERS else _SHOWN[name])(shapes)
    except (KeyError, ValueError, IndexError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise _no_part(name, where, what) from None


def _no_part(name: str, where: str, found: str) -> SourceError:
    return SourceError(
        "wrong_kind",
        f"{where} is no {name.replace('_', ' ')} of Wan",
        expected=f"the weights that {OPTIONS[name]} names",
        found=found,
        remedy="give the file of this part that was published with the model",
    )


def _animate(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that only Animate has, as published except for how often a face is injected."""
    published = PUBLISHED_MODELS["Wan2.2-Animate-14B-Diffusers"]["transformer"]
    base = PUBLISHED_MODELS["Wan2.2-T2V-A14B-Diffusers"]["transformer"]
    own = {name: value for name, value in published.items() if name not in base}
    adapters = layers(shapes, "face_adapter")
    return {**own, "inject_face_latents_blocks": -(-layers(shapes, "blocks") // max(adapters, 1))}


def _anyflow(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that only AnyFlow has, none of which shapes show: as published."""
    del shapes
    published = PUBLISHED_MODELS["AnyFlow-Wan2.1-T2V-1.3B-Diffusers"]["transformer"]
    return {name: published[name] for name in ("gate_value", "deltatime_type")}


def _anyflow_far(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that only AnyFlow-FAR has, none of which shapes show: as published."""
    published = PUBLISHED_MODELS["AnyFlow-FAR-Wan2.1-1.3B-Diffusers"]["transformer"]
    names = ("compressed_patch_size", "full_chunk_limit", "chunk_partition")
    return {**_anyflow(shapes), **{name: published[name] for name in names}}


def _self_forcing(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that only Self-Forcing has, none of which shapes show: as published."""
    del shapes
    published = PUBLISHED_MODELS["Self-Forcing-Wan2.1-1.3B"]["transformer"]
    return {name: published[name] for name in ("local_attn_size", "num_frames_per_block", "sink_size")}


def _helios(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that only Helios has, as published except for the scale of the past's keys."""
    published = PUBLISHED_MODELS["Helios-Base"]["transformer"]
    base = PUBLISHED_MODELS["Wan2.1-T2V-14B-Diffusers"]["transformer"]
    scale = shapes.get("blocks.0.attn1.history_key_scale")
    return {
        **{name: value for name, value in published.items() if name not in base},
        "is_amplify_history": scale is not None,
        "history_scale_mode": "scalar" if scale == (1,) else "per_head",
    }


_OWN: Mapping[str, Callable[[Shapes], dict[str, Any]]] = MappingProxyType(
    {
        "WanAnimateTransformer3DModel": _animate,
        "AnyFlowTransformer3DModel": _anyflow,
        "AnyFlowFARTransformer3DModel": _anyflow_far,
        "CausalWanTransformer3DModel": _self_forcing,
        "HeliosTransformer3DModel": _helios,
    }
)
"""The fields of transformers that have more than Wan's class."""


def _vae(shapes: Shapes) -> dict[str, Any]:
    residual = any(re.match(r"encoder\.down_blocks\.\d+\.resnets\.", key) for key in shapes)
    base, channels = shapes["encoder.conv_in.weight"][:2]
    resnets = layers(shapes, r"decoder\.up_blocks\.0\.resnets")
    out, decoder_base = shapes["decoder.conv_out.weight"][:2]
    return {
        "base_dim": base,
        **({"decoder_base_dim": decoder_base} if residual else {}),
        "in_channels": channels,
        "num_res_blocks": resnets - 1,
        "out_channels": out,
        "z_dim": shapes["post_quant_conv.weight"][0],
    }


def _tiny_vae(shapes: Shapes) -> dict[str, Any]:
    names = [block_name(level, BLOCKS - 1) for level in range(LEVELS)]
    widths = [shapes[f"{name}.4.weight"][0] for name in names]
    stored = [shapes[f"{grow_name(level)}.weight"][0] for level in range(LEVELS)]
    out, last = shapes[f"{CONV_OUT}.weight"][:2]
    patch = math.isqrt(out // 3)
    if out != 3 * patch**2:
        raise ValueError(f"{out} channels of {CONV_OUT}, which are no patch of pixels")
    return {
        "latent_channels": shapes[f"{CONV_IN}.weight"][1],
        "patch_size": patch,
        "stored_frames": [rows // width for rows, width in zip(stored, widths, strict=True)],
        "widths": [*widths, last],
    }


def _text_encoder(shapes: Shapes) -> dict[str, Any]:
    first = "encoder.block.0.layer"
    vocabulary, width = shapes["shared.weight"]
    buckets, heads = shapes[f"{first}.0.SelfAttention.relative_attention_bias.weight"]
    return {
        "d_ff": shapes[f"{first}.1.DenseReluDense.wi_0.weight"][0],
        "d_kv": shapes[f"{first}.0.SelfAttention.q.weight"][0] // heads,
        "d_model": width,
        "num_heads": heads,
        "num_layers": layers(shapes, r"encoder\.block"),
        "relative_attention_num_buckets": buckets,
        "vocab_size": vocabulary,
    }


def _image_encoder(shapes: Shapes) -> dict[str, Any]:
    prefix = "vision_model." if "vision_model.pre_layrnorm.weight" in shapes else ""
    width, _, patch, _ = shapes[f"{prefix}embeddings.patch_embedding.weight"]
    tokens = shapes[f"{prefix}embeddings.position_embedding.weight"][-2]
    return {
        "hidden_size": width,
        "image_size": math.isqrt(tokens - 1) * patch,
        "intermediate_size": shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": layers(shapes, f"{re.escape(prefix)}encoder.layers"),
        "patch_size": patch,
    }


_SHOWN: Mapping[str, Callable[[Shapes], dict[str, Any]]] = MappingProxyType(
    {"vae": _vae, TINY_VAE: _tiny_vae, "text_encoder": _text_encoder, "image_encoder": _image_encoder}
)
