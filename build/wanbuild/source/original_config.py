"""Derives the transformer's config for a checkpoint in the original naming without a diffusers config.json.

Almost all fields follow from shapes. The others are constants of every published transformer, or are in the
original repository's own config.json, if that is in the folder of the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import Divisor, Index, Size, parse_config
from wanrun.errors import SourceError

HEAD_DIM = 128
"""Head size of every published transformer; shapes do not reveal it."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class OriginalConfig:
    """config.json of the original repositories and of Wan-Fun; field names are those of WanModel's
    constructor."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = (
        *("WanModel", "VaceWanModel"),
        *("WanTransformer3DModel", "VaceWanTransformer3DModel", "Wan2_2Transformer3DModel"),  # VideoX-Fun's
    )
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "text_len": 512,
            "qk_norm": True,
            "cross_attn_norm": True,
            "window_size": [-1, -1],
            "add_control_adapter": False,
            "add_ref_conv": False,
        }
    )
    # The parameters reveal the kind of model. VideoX-Fun saves the sizes of parts that are switched off.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("model_type", "cross_attn_type", "in_channels", "hidden_size"),
            *("in_dim_control_adapter", "downscale_factor_control_adapter", "in_dim_ref_conv"),
        }
    )

    dim: Size
    ffn_dim: Size
    in_dim: Size
    out_dim: Size
    num_heads: Size
    num_layers: Size
    freq_dim: Size = 256
    text_dim: Size = 4096
    eps: Divisor = 1e-6
    patch_size: tuple[Size, Size, Size] = (1, 2, 2)
    vace_layers: tuple[Index, ...] | None = None
    vace_in_dim: Size | None = None


def is_original(config: Mapping[str, Any]) -> bool:
    """Returns whether the content of a config.json is the original repository's."""
    return {"dim", "num_heads"} <= config.keys()


def layers(shapes: Shapes, blocks: str) -> int:
    """Returns the number of layers in a stack of blocks, by the pattern of the stack's name."""
    pattern = re.compile(rf"{blocks}\.(\d+)\..+")
    return len({match[1] for key in shapes if (match := pattern.fullmatch(key))})


def fields_of_transformer(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields that every class has and that shapes show.

    Raises KeyError for a missing tensor, and ValueError for another rank, or channels that are not whole
    patches.
    """
    _, channels, *patch = shapes["patch_embedding.weight"]
    volume = math.prod(patch)
    (out, _), (ffn, _) = shapes["proj_out.weight"], shapes["blocks.0.ffn.net.0.proj.weight"]
    if len(patch) != 3 or not volume or out % volume:
        raise ValueError(f"{out} output channels are not whole patches of {patch}")
    image = shapes.get("condition_embedder.image_embedder.norm1.weight", (None,))
    positions = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "added_kv_proj_dim": shapes.get("blocks.0.attn2.add_k_proj.weight", (None,))[0],
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "ffn_dim": ffn,
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "image_dim": image[0],
        "in_channels": channels,
        "num_layers": layers(shapes, "blocks"),
        "out_channels": out // volume,
        "patch_size": patch,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        **({"pos_embed_seq_len": positions[1]} if positions else {}),
    }


def _from_shapes(shapes: Shapes, head_dim: int) -> dict[str, Any]:
    """Returns the fields that every class has; raises as ``fields_of_transformer``, also for half a head."""
    shown = fields_of_transformer(shapes)
    dim = shapes["patch_embedding.weight"][0]
    if not dim or dim % head_dim:
        raise ValueError(f"{dim} channels are not whole heads of {head_dim}")
    return {
        **shown,
        "attention_head_dim": head_dim,
        "eps": 1e-6,
        "num_attention_heads": dim // head_dim,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
    }


def _vace_from_shapes(shapes: Shapes, num_layers: int) -> dict[str, Any]:
    """Returns VACE's own fields; the published models have a control block at every second or fifth layer."""
    count = layers(shapes, "vace_blocks")
    if not count or num_layers % count:
        raise ValueError(f"{count} VACE blocks are not evenly spread over {num_layers} layers")
    return {
        "vace_in_channels": shapes["vace_patch_embedding.weight"][1],
        "vace_layers": list(range(0, num_layers, num_layers // count)),
    }


def _disagreements(config: Mapping[str, Any], original: OriginalConfig) -> list[str]:
    stated = {
        "attention_head_dim": original.dim // original.num_heads,
        "ffn_dim": original.ffn_dim,
        "freq_dim": original.freq_dim,
        "in_channels": original.in_dim,
        "num_attention_heads": original.num_heads,
        "num_layers": original.num_layers,
        "out_channels": original.out_dim,
        "patch_size": list(original.patch_size),
        "text_dim": original.text_dim,
    }
    if original.vace_in_dim is not None:
        stated["vace_in_channels"] = original.vace_in_dim
    return [
        f"{name} is {stated[name]}, the weights say {config.get(name)}"
        for name in sorted(stated)
        if stated[name] != config.get(name)
    ]


def derive_config(
    class_name: str, shapes: Shapes, weights: str, original: Mapping[str, Any] | None = None, where: str = ""
) -> dict[str, Any]:
    """Returns a transformer's diffusers config as that repository publishes it, without the version.

    ``class_name`` is its diffusers class, ``shapes`` is by diffusers name. ``original`` is the content of the
    original repository's config.json, ``where`` that file's name. Raises SourceError if shapes are missing,
    the class's config cannot be derived, or the original config is not understood or contradicts the shapes.
    """
    stated = None if original is None else parse_config(OriginalConfig, original, where)
    if stated is not None and stated.dim % stated.num_heads:
        raise SourceError(
            "unreadable",
            f"{where} is not understood: dim {stated.dim} is not {stated.num_heads} whole heads",
            remedy="use the config.json that was published with these weights",
        )
    try:
        config = _from_shapes(shapes, HEAD_DIM if stated is None else stated.dim // stated.num_heads)
        if class_name == "WanVACETransformer3DModel":
            config |= _vace_from_shapes(shapes, config["num_layers"])
        elif class_name != "WanTransformer3DModel":
            raise ValueError(f"{class_name} has fields that its shapes do not show")
    except (KeyError, ValueError, IndexError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            "mismatch",
            f"{weights} has no config.json next to it, and its shapes do not make one: {what}",
            remedy="copy transformer/config.json from the repository whose name ends in -Diffusers",
        ) from None
    if stated is not None:
        if problems := _disagreements(config, stated):
            raise SourceError(
                "mismatch",
                f"{where} does not fit {weights}: {', '.join(problems)}",
                remedy="use the config.json that was published with these weights",
            )
        config["eps"] = stated.eps
        if stated.vace_layers is not None:
            config["vace_layers"] = list(stated.vace_layers)
    return {"_class_name": class_name, **config}
