"""Random values for a toy checkpoint's parameters, and their weight files."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from wanbuild.source.safetensors import DTYPES as STORED_DTYPES
from wanbuild.source.shapes import Shapes

_STORED_NAMES: Mapping[str, str] = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {name: STORED_DTYPES[stored] for name, stored in _STORED_NAMES.items()}
)


_NORM = re.compile(r".*(\.gamma|norm[^.]*\.weight)")
# Deviation 1. The motion encoder divides its weights by sqrt(fan in) when it uses them.
_PLAIN = re.compile(
    r"shared\.weight|.*relative_attention_bias\.weight|motion_encoder\..*\.weight|.*motion_synthesis_weight"
    r"|.*\.(class_embedding|position_embedding\.weight|pos_embed|padding_tokens)"
)
# Standard deviation relative to 1/sqrt(fan in), if not 1.
_GAINS: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r".*SelfAttention\.q\.weight"), 0.35),  # UMT5 does not divide scores by sqrt(head size)
    # A prompt has few of 512 tokens, and the others are zero; its effect would otherwise be small.
    (re.compile(r".*\.attn2\.to_out\.0\.weight"), 4.0),
    # A face is three tokens, and their width is normalised again; its effect would otherwise be small.
    (re.compile(r"face_adapter\..*\.to_out\.weight"), 3.0),
    # Normalised latents with a deviation near 1, so that the conditions are visible against the noise.
    (re.compile(r"encoder\.conv_out\.weight"), 3.0),
    (re.compile(r"decoder\.conv_out\.weight"), 0.8),  # few pixels exceed the clip to [-1, 1]
)


def random_tensor(component: str, key: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns the value of a toy's parameter, float32; it depends only on name, shape and seed.

    Norm scales are uniform in 1 ± 0.2, biases in ± 0.1. Embeddings, position biases and the motion encoder's
    weights are normal with deviation 1, other weights normal with deviation gain / sqrt(fan in).
    """
    rng = np.random.default_rng((seed, zlib.crc32(f"{component}/{key}".encode())))
    if key.endswith(".bias"):
        return rng.uniform(-0.1, 0.1, shape).astype(np.float32)
    if _NORM.fullmatch(key):
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    values = rng.standard_normal(shape, np.float32)
    if _PLAIN.fullmatch(key):
        return values
    fan_in = shape[-1] if key.endswith("scale_shift_table") else math.prod(shape[1:])
    gain = next((gain for pattern, gain in _GAINS if pattern.fullmatch(key)), 1.0)
    values *= np.float32(gain / math.sqrt(fan_in))
    return values


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object like diffusers: indented, with sorted keys."""
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
    """Writes a safetensors file whose data is a hole: it reads as zeros and takes no disk space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[key] = {"dtype": _STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


@dataclass(frozen=True)
class Stored:
    """The form in which weights are stored.

    ``dtype`` is that of every tensor, one of ``DTYPES``; ``shards`` is the most files per component, and more
    than one come with an index. If ``sparse``, every value is zero and takes no disk space: for sizes that
    would not fit the disk.
    """

    dtype: str = "float32"
    shards: int = 1
    sparse: bool = False


def write_weights(
    folder: Path,
    component: str,
    base: str,
    shapes: Shapes,
    seed: int,
    stored: Stored,
) -> None:
    """Writes one file, or shards and their index. Holds one shard in memory at a time.

    The folder must exist, and ``base`` is the file's name without suffix. The values depend on the
    component's name and the seed.
    """
    groups, dtype = _groups(shapes, stored.shards), DTYPES[stored.dtype]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            f"{base}.safetensors"
            if len(groups) == 1
            else f"{base}-{number:05}-of-{len(groups):05}.safetensors"
        )
        if stored.sparse:
            _write_hole({key: shapes[key] for key in group}, stored.dtype, folder / name)
        else:
            tensors = {
                key: random_tensor(component, key, shapes[key], seed).astype(dtype, copy=False)
                for key in group
            }
            save_file(tensors, folder / name, metadata={"format": "pt"})  # transformers requires the format
        weight_map |= dict.fromkeys(group, name)
    if len(groups) > 1:
        size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / f"{base}.safetensors.index.json", index)
