"""Writes a small random checkpoint in the published folder layout, offline and without torch.

Every parameter is random and of a size that keeps activations in range: a constant or saturated video
would hide mistakes. Other sizes, up to the published ones, come from overriding config fields.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from wanbuild.published import (
    MODEL_INDEX,
    PUBLISHED_TEXT_ENCODER,
    PUBLISHED_TRANSFORMERS,
    PUBLISHED_VAE,
    SCHEDULER_CONFIGS,
    Config,
)
from wanbuild.shards import WEIGHT_NAMES
from wanbuild.toy_shapes import Shapes, text_encoder_shapes, transformer_shapes, vae_shapes
from wanbuild.toy_tokenizer import vocabulary, write_tokenizer
from wanrun.errors import UsageError

MARKER = "wanbuild_toy.json"
"""A file that says that a folder was written here, and so may be replaced."""

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
    }
)
_STORED_NAMES: Mapping[str, str] = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})


def _toy(published: Config, **sizes: Any) -> Config:
    return MappingProxyType({**published, **sizes})


# Head size 20 splits into 8, 6 and 6 for RoPE, as uneven as the published 44, 42 and 42. Sizes differ from
# one another where the published ones do, so that a swapped axis cannot pass.
TOY_TRANSFORMER = _toy(
    PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"],
    num_attention_heads=2,
    attention_head_dim=20,
    ffn_dim=56,
    freq_dim=64,
    num_layers=3,
    text_dim=32,
)
TOY_VAE = _toy(PUBLISHED_VAE, base_dim=6, num_res_blocks=1)
TOY_TEXT_ENCODER = _toy(
    PUBLISHED_TEXT_ENCODER,
    d_ff=37,
    d_kv=8,
    d_model=32,
    num_decoder_layers=2,
    num_heads=4,
    num_layers=2,
    relative_attention_num_buckets=8,
    # Some rows more than the tokenizer has ids, as published.
    vocab_size=len(vocabulary()) + 16,
)


@dataclass(frozen=True)
class _Component:
    base: Config
    library: str
    shapes: Callable[[Config], Shapes]


_COMPONENTS: Mapping[str, _Component] = MappingProxyType(
    {
        "transformer": _Component(TOY_TRANSFORMER, "diffusers", transformer_shapes),
        "vae": _Component(TOY_VAE, "diffusers", vae_shapes),
        "text_encoder": _Component(TOY_TEXT_ENCODER, "transformers", text_encoder_shapes),
    }
)
TOY_VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"wan2.1-t2v": tuple(_COMPONENTS)})

_NORM = re.compile(r".*(\.gamma|norm[^.]*\.weight)")
# Standard deviation relative to 1/sqrt(fan in), where that is not 1.
_GAINS: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r".*SelfAttention\.q\.weight"), 0.35),  # UMT5 does not divide scores by sqrt(head size)
    # A prompt is a few of 512 tokens and the rest are zero: without this its effect would be small.
    (re.compile(r".*\.attn2\.to_out\.0\.weight"), 4.0),
    (re.compile(r"decoder\.conv_out\.weight"), 0.8),  # few pixels past the clip to [-1, 1]
)


def random_tensor(component: str, key: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The value that a toy's parameter has, float32; it depends on the name, shape and seed alone.

    Norm scales are uniform in 1 ± 0.2, biases in ± 0.1, the embedding and the position bias normal with
    deviation 1, and weights normal with deviation gain / sqrt(fan in).
    """
    rng = np.random.default_rng((seed, zlib.crc32(f"{component}/{key}".encode())))
    if key.endswith(".bias"):
        return rng.uniform(-0.1, 0.1, shape).astype(np.float32)
    if _NORM.fullmatch(key):
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    values = rng.standard_normal(shape, np.float32)
    if key == "shared.weight" or key.endswith("relative_attention_bias.weight"):
        return values
    fan_in = shape[-1] if key.endswith("scale_shift_table") else math.prod(shape[1:])
    gain = next((gain for pattern, gain in _GAINS if pattern.fullmatch(key)), 1.0)
    values *= np.float32(gain / math.sqrt(fan_in))
    return values


def _override(name: str, base: Config, changes: Mapping[str, Any] | None) -> dict[str, Any]:
    unknown = sorted((changes or {}).keys() - base.keys())
    if unknown:
        raise UsageError(
            f"the {name} config has no field {', '.join(unknown)}", expected="one of " + ", ".join(base)
        )
    return {**base, **(changes or {})}


def _check_configs(configs: Mapping[str, Mapping[str, Any]]) -> None:
    transformer, vae, text = (configs[name] for name in ("transformer", "vae", "text_encoder"))
    z, tokens = vae["z_dim"], len(vocabulary())
    for what, expected, found in (
        ("transformer text_dim", text["d_model"], transformer["text_dim"]),
        ("transformer in_channels", z, transformer["in_channels"]),
        ("transformer out_channels", z, transformer["out_channels"]),
        ("length of vae latents_mean", z, len(vae["latents_mean"])),
        ("length of vae latents_std", z, len(vae["latents_std"])),
    ):
        if expected != found:
            raise UsageError(f"{what} does not fit the other configs", expected=expected, found=found)
    if text["vocab_size"] < tokens:
        raise UsageError(
            "text_encoder vocab_size is too small", expected=f"at least {tokens}", found=text["vocab_size"]
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _groups(shapes: Shapes, shards: int) -> list[list[str]]:
    """Splits the keys, in order, into at most this many groups of about equal size."""
    total, done = sum(math.prod(shape) for shape in shapes.values()), 0
    groups: list[list[str]] = [[] for _ in range(shards)]
    for key, shape in shapes.items():
        groups[min(shards - 1, done * shards // total)].append(key)
        done += math.prod(shape)
    return [group for group in groups if group]


def _write_hole(shapes: Shapes, dtype: str, path: Path) -> None:
    """Writes a safetensors file whose data is a hole: it reads as zeros and takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[key] = {"dtype": _STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


def _write_weights(
    folder: Path, component: str, shapes: Shapes, seed: int, dtype: str, shards: int, sparse: bool
) -> None:
    """Writes one file, or shards and their index. Holds one shard in memory at a time."""
    base = WEIGHT_NAMES[_COMPONENTS[component].library]
    groups = _groups(shapes, shards)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            f"{base}.safetensors"
            if len(groups) == 1
            else f"{base}-{number:05}-of-{len(groups):05}.safetensors"
        )
        if sparse:
            _write_hole({key: shapes[key] for key in group}, dtype, folder / name)
        else:
            tensors = {
                key: random_tensor(component, key, shapes[key], seed).astype(DTYPES[dtype], copy=False)
                for key in group
            }
            save_file(tensors, folder / name, metadata={"format": "pt"})  # transformers asks for the format
        weight_map |= dict.fromkeys(group, name)
    if len(groups) > 1:
        size = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(folder / f"{base}.safetensors.index.json", index)


def _check_target(directory: Path, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a folder", remedy="give another folder")
    if directory.is_dir() and any(directory.iterdir()) and not (force or (directory / MARKER).exists()):
        raise UsageError(
            f"{directory} is not empty, and not a toy checkpoint",
            remedy="give another folder, or force its replacement",
        )


def _move_into_place(staging: Path, directory: Path) -> None:
    if not directory.exists():
        staging.rename(directory)
        return
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.old-", dir=directory.parent) as aside:
        old = directory.rename(Path(aside) / "old")
        try:
            staging.rename(directory)
        except OSError:
            old.rename(directory)
            raise


def write_toy(
    directory: Path,
    variant: str = "wan2.1-t2v",
    seed: int = 0,
    *,
    transformer: Mapping[str, Any] | None = None,
    vae: Mapping[str, Any] | None = None,
    text_encoder: Mapping[str, Any] | None = None,
    scheduler: str = "unipc",
    flow_shift: float = 3.0,
    dtype: str = "float32",
    shards: int = 1,
    sparse: bool = False,
    force: bool = False,
) -> None:
    """Writes a random checkpoint; the same arguments give the same bytes.

    It is built in a sibling folder and renamed, so a failure leaves what was there.

    Args:
        directory: the folder to make. A toy that is already there is replaced.
        variant: one of ``TOY_VARIANTS``.
        seed: of the parameters; not negative.
        transformer: fields of transformer/config.json that differ from ``TOY_TRANSFORMER``.
        vae: the same for the VAE, ``TOY_VAE``.
        text_encoder: the same for the text encoder, ``TOY_TEXT_ENCODER``.
        scheduler: ``unipc``, ``dpm++`` or ``euler``.
        flow_shift: the shift that scheduler_config.json states.
        dtype: of every stored tensor: ``float32``, ``float16`` or ``bfloat16``.
        shards: files per component; more than one come with an index.
        sparse: every value is zero and takes no room on the disk: for sizes that would not fit it.
        force: replace the folder whatever it holds.

    Raises:
        UsageError: if an argument is not one of its values, the configs do not fit one another, or the
            folder holds something else.
    """
    for what, value, known in (
        ("variant", variant, TOY_VARIANTS),
        ("scheduler", scheduler, SCHEDULER_CONFIGS),
        ("dtype", dtype, DTYPES),
    ):
        if value not in known:
            raise UsageError(f"unknown {what}", expected=" or ".join(known), found=value)
    if seed < 0 or shards < 1:
        raise UsageError(
            "seed or shards is out of range", expected="seed >= 0, shards >= 1", found=(seed, shards)
        )
    changes = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder}
    configs = {name: _override(name, _COMPONENTS[name].base, changes[name]) for name in TOY_VARIANTS[variant]}
    configs["text_encoder"]["torch_dtype"] = dtype
    _check_configs(configs)
    directory = Path(directory).resolve()
    _check_target(directory, force)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.new-", dir=directory.parent) as temporary:
        staging = Path(temporary) / directory.name
        for name, config in configs.items():
            folder = staging / name
            folder.mkdir(parents=True)
            _write_json(folder / "config.json", config)
            _write_weights(folder, name, _COMPONENTS[name].shapes(config), seed, dtype, shards, sparse)
        scheduler_config = dict(SCHEDULER_CONFIGS[scheduler])
        scheduler_config["shift" if "shift" in scheduler_config else "flow_shift"] = flow_shift
        (staging / "scheduler").mkdir()
        _write_json(staging / "scheduler" / "scheduler_config.json", scheduler_config)
        (staging / "tokenizer").mkdir()
        write_tokenizer(staging / "tokenizer")
        index = {**MODEL_INDEX, "scheduler": ["diffusers", scheduler_config["_class_name"]]}
        _write_json(staging / "model_index.json", index)
        _write_json(staging / MARKER, {"seed": seed, "variant": variant})
        _move_into_place(staging, directory)
