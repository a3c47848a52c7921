"""Checkpoints whose configs, model_index.json or tokenizer cannot be used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hostile.changes import JSON_FILES, TOKENIZER, Change, Checkpoint, Row, fields, index, json_of, text
from hostile.things import TEXTS, VALUES

_FIELDS: dict[str, dict[str, str]] = {
    "vae/config.json": {
        **dict.fromkeys(("base_dim", "dim_mult", "num_res_blocks", "temperal_downsample"), "unreadable"),
        "latents_mean": "unreadable",
        "z_dim": "unsupported",
    },
    "transformer/config.json": {
        **dict.fromkeys(("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers"), "unreadable"),
        **dict.fromkeys(("freq_dim", "rope_max_seq_len", "qk_norm"), "unreadable"),
        **dict.fromkeys(("text_dim", "in_channels", "patch_size"), "unsupported"),
        "_class_name": "wrong_kind",
    },
    "text_encoder/config.json": {
        **dict.fromkeys(("d_kv", "d_ff", "num_layers", "num_heads", "feed_forward_proj"), "unreadable"),
        "relative_attention_max_distance": "unreadable",
        **dict.fromkeys(("vocab_size", "d_model"), "unsupported"),
        "architectures": "wrong_kind",
    },
    "scheduler/scheduler_config.json": {
        "flow_shift": "unreadable",
        "prediction_type": "unreadable",
        "solver_order": "unreadable",
        "_class_name": "mismatch",
    },
    "model_index.json": {
        "_class_name": "unsupported",
        **dict.fromkeys(("vae", "transformer", "unknown"), "unreadable"),
        "boundary_ratio": "wrong_type",
        "expand_timesteps": "wrong_type",
    },
    TOKENIZER: {"model": "unreadable", "added_tokens": "unreadable"},
}
_OF_RIGHT_TYPE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "latents_mean": (lambda value: isinstance(value, list) and not value, "mismatch"),
    "flow_shift": (lambda value: isinstance(value, float) and math.isfinite(value), "out_of_range"),
    "prediction_type": (lambda value: isinstance(value, str), "wrong_kind"),
    **dict.fromkeys(("vae", "transformer", "unknown"), (lambda value: value is None, "unsupported")),
}
"""By field: whether a value has the right type, so that what it means is wrong, and the code of that."""

_HARMLESS: dict[str, tuple[Any, ...]] = {
    # What these values of these fields mean is supported, or is the same as leaving the field out.
    "architectures": (None, [], [None]),
    "_class_name": (None,),
    "boundary_ratio": (None,),
    "expand_timesteps": (None,),
    "flow_shift": (None, 1.5),
    "added_tokens": ([], "", {}),
}
_EMPTY = {
    **dict.fromkeys(
        ("transformer/config.json", "text_encoder/config.json", "model_index.json"), "unsupported"
    ),
    "vae/config.json": "mismatch",
    **dict.fromkeys(("scheduler/scheduler_config.json", TOKENIZER), "unreadable"),
}
_CONFIGS: tuple[tuple[str, dict[str, Any], str, tuple[object, ...]], ...] = (
    ("transformer/config.json", {"window": 7}, "unreadable", ("config.json", "window", 7)),
    ("transformer/config.json", {"in_channels": 36}, "unsupported", ("in_channels", 36, 16)),
    ("transformer/config.json", {"out_channels": 48}, "unsupported", ("out_channels", 48, 16)),
    ("transformer/config.json", {"image_dim": 1280}, "unsupported", ("image_dim",)),
    ("transformer/config.json", {"patch_size": [1, 1, 1]}, "unsupported", ("patch_size", [1, 1, 1])),
    (
        "transformer/config.json",
        {"_class_name": "SD3Transformer2DModel"},
        "wrong_kind",
        ("WanTransformer3DModel",),
    ),
    ("vae/config.json", {"patch_size": 4}, "unsupported", ("patch_size", 4)),
    ("vae/config.json", {"base_dim": "wide"}, "unreadable", ("vae/config.json", "base_dim", "'wide'")),
    ("text_encoder/config.json", {"d_model": 64}, "unsupported", ("text_dim", 32, 64)),
    ("text_encoder/config.json", {"vocab_size": 200}, "unsupported", (296, 200)),
    (
        "text_encoder/config.json",
        {"feed_forward_proj": "relu"},
        "unreadable",
        ("text_encoder/config.json", "feed_forward_proj", "'relu'", "'gated-gelu'"),
    ),
    (TOKENIZER, {"model": {"type": "BPE", "vocab": {"a": 1}}}, "unreadable", ("tokenizer.json",)),
    (JSON_FILES[3], {"pad_token": "<nothing>"}, "unreadable", ("<nothing>",)),
    (JSON_FILES[3], {"padding_side": "left"}, "mismatch", ("right", "left")),
    (
        "scheduler/scheduler_config.json",
        {"_class_name": "DPMSolverMultistepScheduler"},
        "mismatch",
        ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"),
    ),
)
_PIPELINES: tuple[tuple[dict[str, Any], str, tuple[object, ...]], ...] = (
    ({"_class_name": "FluxPipeline"}, "unsupported", ("WanPipeline", "FluxPipeline")),
    ({"_class_name": "WanVACEPipeline"}, "unsupported", ("WanTransformer3DModel", "WanVACE")),
    ({"_class_name": ...}, "unsupported", ("WanPipeline",)),
    ({"transformer_2": ["diffusers", "WanTransformer2D"]}, "unsupported", ("WanTransformer2D",)),
    (
        {"transformer_2": ["diffusers", "WanTransformer3DModel"]},
        "conflict",
        ("transformer_2", "boundary_ratio"),
    ),
    ({"boundary_ratio": 0.875}, "conflict", ("0.875", "no transformer_2")),
    ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "unsupported", ("image_encoder",)),
    ({"vae": ["diffusers", "AutoencoderKL"]}, "unsupported", ("diffusers.AutoencoderKL,",)),
    ({"vae": ["somewhere", "AutoencoderKLWan"]}, "unsupported", ("somewhere.AutoencoderKLWan",)),
    ({"vae": [None, None]}, "unsupported", ("vae",)),
    ({"text_encoder": None}, "unsupported", ("text_encoder",)),
    ({"vae": "AutoencoderKLWan"}, "unreadable", ("vae",)),
    ({"scheduler": ["diffusers", "DDIMScheduler"]}, "unsupported", ("DDIMScheduler",)),
    ({"vae_scale": 8}, "unreadable", ("vae_scale",)),
    ({"helper": [None, None]}, "unsupported", ("helper",)),
    ({"helper": ["diffusers", "Helper"]}, "unsupported", ("diffusers.Helper",)),
    ({"boundary_ratio": "0.9"}, "wrong_type", ("boundary_ratio",)),
    ({"expand_timesteps": 1}, "wrong_type", ("expand_timesteps",)),
    ({"expand_timesteps": True}, "unsupported", ("wan2.1-t2v", "expand_timesteps", "wan2.2-ti2v")),
    (
        {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": None, "helper": ["a", "B"]},
        "unsupported",
        ("vae is", "text_encoder is", "helper (a.B)", "wan2.1-t2v"),
    ),
)


def _deep(file: str, name: str) -> Change:
    """A field that cannot change a result, so deep that the manifest could not be written."""

    def change(checkpoint: Checkpoint) -> None:
        raw = json.dumps({**json.loads((checkpoint.folder / file).read_bytes()), name: "@"})
        checkpoint.write(file, raw.replace('"@"', "[" * 900 + "]" * 900).encode())

    return change


def _configs() -> Iterator[Row]:
    for file in JSON_FILES:
        for name, raw in TEXTS.items():
            yield Row(f"{file} of {name}", text(file, raw), "unreadable", (file.partition("/")[0],))
    for file, code in _EMPTY.items():
        yield Row(f"{file} of an empty object", text(file, b"{}"), code)
    draw = np.random.default_rng(20_250_301)
    for file, names in _FIELDS.items():
        for field, code in names.items():
            for value in VALUES:
                harmless = _HARMLESS.get(field, ())
                if any(value is x or value == x for x in harmless) or draw.random() > 0.2:
                    continue  # one in five of all fields and values
                name = f"{file} with {field} {json.dumps(value)[:24]}"
                fits, other = _OF_RIGHT_TYPE.get(field, (lambda value: False, code))
                yield Row(name, fields(file, **{field: value}), other if fits(value) else code)
    for file, values, code, named in _CONFIGS:
        yield Row(f"{file} of {values}", fields(file, **values), code, named)
    for values, code, named in _PIPELINES:
        yield Row(f"a pipeline of {values}", index(**values), code, named)
    for file, field in (("vae/config.json", "dropout"), ("scheduler/scheduler_config.json", "beta_end")):
        yield Row(f"a deep field in {file}", _deep(file, field), "unreadable", (Path(file).name, 32))


_FAR = {"content": "<far>", "id": 10**9}
_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a vocabulary that is an object": lambda d: d["model"].update(vocab={"a": 1}),
    "an empty vocabulary": lambda d: (d["model"].update(vocab=[]), d.update(added_tokens=[])),
    "pieces that are numbers": lambda d: d["model"].update(vocab=[1, 2]),
    "pieces of three": lambda d: d["model"].update(vocab=[["a", 1, 2]]),
    "pieces that are null": lambda d: d["model"].update(vocab=[None]),
    "added tokens that are numbers": lambda d: d.update(added_tokens=[1]),
    "an added token without an id": lambda d: d.update(added_tokens=[{"content": "<pad>"}]),
    "an added token with an odd id": lambda d: d.update(added_tokens=[{"content": "<pad>", "id": "x"}]),
    "an added token with a list for a name": lambda d: d.update(added_tokens=[{"content": [], "id": 0}]),
    "an added token with an infinite id": lambda d: d["added_tokens"].append({**_FAR, "id": float("inf")}),
    "an added token far behind the table": lambda d: d["added_tokens"].append(_FAR),
    "more pieces than embeddings": lambda d: d["model"]["vocab"].extend([f"p{i}", 0.0] for i in range(1000)),
}


def _tokenizers() -> Iterator[Row]:
    for name, edit in _TOKENIZERS.items():
        code = "unsupported" if "far" in name or "more" in name else "unreadable"
        yield Row(name, json_of(TOKENIZER, edit), code, ("tokenizer",))


ROWS: tuple[Row, ...] = (*_configs(), *_tokenizers())
