"""Checkpoints with two experts, or of images, whose parts contradict one another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile.changes import (
    SECOND,
    Change,
    Checkpoint,
    Row,
    Tensors,
    all_of,
    becomes,
    fields,
    index,
    renamed,
    tensors,
    text,
)
from hostile.things import VALUES

_CONFIG = "transformer/config.json"
_BOTH = ("boundary_ratio", "transformer_2")
_WAN = ["diffusers", "WanTransformer3DModel"]
_OF_ONE = {
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "ffn_dim": 57,
    "num_layers": 2,
    "text_dim": 16,
    "in_channels": 36,
    "out_channels": 48,
    "freq_dim": 256,
    "eps": 1e-5,
    "patch_size": [1, 1, 4],
    "rope_max_seq_len": 512,
    "pos_embed_seq_len": 514,
}
_BOUNDARIES = (-0.1, 1.0001, 875, -1e-300, -1e-9, 1 + 1e-9, "0.875", True, [0.9], *VALUES)


def _experts() -> Iterator[Row]:
    for value in _BOUNDARIES:
        if value is not None and not (type(value) is int and value == 0):
            change = index(boundary_ratio=value)
            yield Row(
                f"a boundary {str(value)[:24]!r}", change, "wrong_type", ("boundary_ratio", 0, 1), "experts"
            )
    for value in (*VALUES, ["diffusers"], ["diffusers", None]):
        code = "conflict" if value is None else "unreadable"
        name = f"transformer_2 {json.dumps(value)[:24]}"
        yield Row(name, index(transformer_2=value), code, ("transformer_2",), "experts")
    for field, value in _OF_ONE.items():
        change = fields("transformer_2/config.json", **{field: value})
        yield Row(f"{field} {value} in one expert", change, "mismatch", (field,), "experts")
    for name, change, code, *values in (
        ("a boundary and no entry", index(transformer_2=...), "conflict", *_BOTH, 0.875),
        ("a boundary and an entry of null", index(transformer_2=[None, None]), "conflict", *_BOTH, 0.875),
        ("experts and no boundary", index(boundary_ratio=...), "conflict", *_BOTH),
        ("experts and a boundary of null", index(boundary_ratio=None), "conflict", *_BOTH),
        (
            "an expert that is not listed",
            index(transformer_2=..., boundary_ratio=...),
            *("mismatch", "transformer_2", "model_index.json"),
        ),
        (
            "a VAE as an expert",
            index(transformer_2=["diffusers", "AutoencoderKLWan"]),
            "unsupported",
            "transformer_2",
        ),
        (
            "the low-noise expert alone",
            all_of(becomes("transformer"), index(transformer=[None, None])),
            *("unsupported", "transformer is", "wan2.2-t2v"),
        ),
        (
            "one file beside two experts",
            renamed(SECOND, Path(SECOND).name),
            *("missing_file", "/transformer_2 "),
        ),
        (
            "experts of two configs",
            fields("transformer_2/config.json", eps=1e-5, rope_max_seq_len=512),
            *("mismatch", "eps 1e-06", "rope_max_seq_len 1024", "eps 1e-05", "rope_max_seq_len 512"),
        ),
        (
            "experts of two shapes",
            tensors(SECOND, _narrower),
            "mismatch",
            "transformer_2: ",
            "proj_out.bias",
            "[60]",
            "[64]",
        ),
        (
            "an expert without a tensor",
            tensors(SECOND, lambda found, _: found.pop("blocks.1.attn1.to_k.weight")),
            *("mismatch", "transformer_2: ", "blocks/attn1/to_k/weight", "1"),
        ),
        ("an expert that is not finite", tensors(SECOND, _nan), "not_finite", "transformer_2: proj_out.bias"),
        (
            "a timestep per token with experts",
            index(expand_timesteps=True),
            "unsupported",
            "wan2.2-t2v",
            "expand_timesteps",
        ),
        (
            "experts with the VAE of 2.2",
            fields("vae/config.json", patch_size=2, z_dim=48),
            *("unsupported", "vae patch_size", "out_channels", 48),
        ),
    ):
        yield Row(name, change, code, tuple(values), "experts")
    for base, variant, other in (("float32", "wan2.1-t2v", "ti2v"), ("ti2v", "wan2.2-ti2v", "float32")):
        named = (f"{variant}: vae patch_size", "vae z_dim")
        yield Row(f"{variant} with the VAE of {other}", _vae_of(other), "unsupported", named, base)
    for value, code, *values in (
        (..., "unsupported", "wan2.2-ti2v", "expand_timesteps", False),
        ("yes", "wrong_type", "expand_timesteps", "'yes'"),
    ):
        yield Row(f"TI2V with {value!r}", index(expand_timesteps=value), code, tuple(values), "ti2v")


def _vae_of(other: str) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        shutil.rmtree(checkpoint.folder / "vae")
        shutil.copytree(checkpoint.good.with_name(other) / "vae", checkpoint.folder / "vae")

    return change


def _narrower(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, (size,), values = found["proj_out.bias"]
    found["proj_out.bias"] = dtype, (size - 4,), values[:-16]


def _nan(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, shape, values = found["proj_out.bias"]
    found["proj_out.bias"] = dtype, shape, b"\xff" * len(values)


# --- images and videos --------------------------------------------------------------------------------------

_PROCESSOR = "image_processor/preprocessor_config.json"
_IMAGE_ENCODER = "image_encoder/config.json"
_VACE, _BASE = "WanVACETransformer3DModel", "WanTransformer3DModel"
_CONTRADICTIONS: tuple[tuple[str, str, dict[str, Any], str, tuple[object, ...]], ...] = (
    ("wan2.1-i2v", _IMAGE_ENCODER, {"hidden_size": 24}, "unsupported", ("image_dim", 28, 24)),
    ("wan2.1-i2v", _CONFIG, {"image_dim": None}, "unsupported", ("image_dim",)),
    ("wan2.1-i2v", _CONFIG, {"in_channels": 32}, "unsupported", ("in_channels", 32, 36)),
    ("wan2.1-i2v", _CONFIG, {"pos_embed_seq_len": 9}, "unsupported", ("wan2.1-flf2v", 9, 20)),
    ("wan2.1-i2v", _PROCESSOR, {"crop_size": 40}, "unsupported", ("crop_size", 40, 42)),
    ("wan2.1-flf2v", _IMAGE_ENCODER, {"image_size": 56}, "unsupported", ("pos_embed_seq_len", 20, 34)),
    ("wan2.1-flf2v", _IMAGE_ENCODER, {"patch_size": 0}, "unsupported", ("patch_size", [42, 0])),
    ("wan2.1-vace", _CONFIG, {"vace_in_channels": 64}, "unsupported", ("in_channels", 64, 96)),
    ("wan2.1-vace", _CONFIG, {"in_channels": 36}, "unsupported", ("in_channels", 36, 16)),
    ("wan2.2-i2v", _CONFIG, {"in_channels": 16}, "unsupported", ("wan2.2-i2v", 16, 36)),
    ("wan2.2-animate", _CONFIG, {"latent_channels": 4}, "unsupported", ("channels", 4, 16)),
    ("wan2.2-animate", _CONFIG, {"pos_embed_seq_len": 20}, "unsupported", ("pos_embed_seq_len", 20)),
    ("wan2.2-animate", "vae/config.json", {"z_dim": "16"}, "unsupported", ("vae z_dim", "'16'")),
    # A field that contradicts another one of its file.
    ("wan2.1-i2v", _CONFIG, {"added_kv_proj_dim": None}, "mismatch", ("/transformer/config.json", None, 40)),
    ("wan2.1-i2v", _CONFIG, {"added_kv_proj_dim": 20}, "mismatch", ("added_kv_proj_dim is 20", 40)),
    ("wan2.1-vace", _CONFIG, {"vace_layers": [0, 3]}, "mismatch", ("vace_layers", [0, 3])),
    ("wan2.1-vace", _CONFIG, {"vace_layers": [1, 2]}, "mismatch", ("vace_layers", [1, 2])),
    ("wan2.1-vace", _CONFIG, {"vace_layers": []}, "mismatch", ("vace_layers", [])),
    ("wan2.1-vace", _CONFIG, {"vace_layers": [0, 1, 2]}, "mismatch", ("vace_blocks",)),
    ("wan2.2-animate", _CONFIG, {"inject_face_latents_blocks": 3}, "mismatch", ("latents_blocks is 3",)),
    ("wan2.2-animate", _CONFIG, {"motion_encoder_size": 24}, "mismatch", ("motion_encoder_size", 24)),
    ("wan2.2-animate", _CONFIG, {"motion_encoder_size": 32}, "mismatch", (32,)),
    ("wan2.2-animate", _IMAGE_ENCODER, {"hidden_act": "relu"}, "mismatch", (_IMAGE_ENCODER, "hidden_act")),
    ("float32", "vae/config.json", {"temperal_downsample": [True] * 3}, "mismatch", ("temperal_downsample",)),
)
_INDEXES: tuple[tuple[str, dict[str, Any], str, tuple[object, ...]], ...] = (
    ("wan2.1-i2v", {"image_processor": [None, None]}, "unsupported", ("wan2.1-i2v", "image_processor")),
    ("wan2.1-i2v", {"image_encoder": ["transformers", "Siglip"]}, "unsupported", ("image_encoder",)),
    ("wan2.1-i2v", {"image_processor": ["transformers", "Siglip"]}, "unsupported", ("image_processor",)),
    ("wan2.1-i2v", {"expand_timesteps": True}, "unsupported", ("expand_timesteps", True)),
    ("wan2.2-i2v", {"boundary_ratio": None}, "conflict", _BOTH),
    ("wan2.1-vace", {"transformer": ["diffusers", _BASE]}, "unsupported", ("WanVACE",)),
    ("wan2.2-animate", {"image_encoder": [None, None]}, "unsupported", ("image_encoder",)),
    (
        "wan2.1-vace",
        {"_class_name": "WanPipeline", "transformer": ["diffusers", _BASE]},
        "wrong_kind",
        (_BASE, _VACE),
    ),
    (
        "float32",
        {"_class_name": "WanVACEPipeline", "transformer": ["diffusers", _VACE]},
        "wrong_kind",
        (_BASE, _VACE),
    ),
)


def _images() -> Iterator[Row]:
    for base, file, values, code, named in _CONTRADICTIONS:
        yield Row(f"{base}: {file} of {values}", fields(file, **values), code, named, base)
    for base, values, code, named in _INDEXES:
        yield Row(f"{base}: an index of {values}", index(**values), code, named, base)
    for name, change, code in (
        ("a processor that is a list", text(_PROCESSOR, b"[224]"), "unreadable"),
        ("no processor", becomes(_PROCESSOR), "missing_file"),
    ):
        yield Row(name, change, code, ("preprocessor_config.json",), "wan2.1-i2v")


ROWS: tuple[Row, ...] = (*_experts(), *_images())
