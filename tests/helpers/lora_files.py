"""LoRA files of the toy's transformer in every layout, and the deltas that they mean, in float64 by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from wanbuild.lora.deltas import Delta
from wanbuild.lora.merge import LoraRequest, Loras, open_loras
from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_configs import TOY_TRANSFORMER
from wanrun.errors import SourceError

SHAPES = component_shapes("transformer", TOY_TRANSFORMER)
RANK, ALPHA = 4, 6.5
PRECISION = 1e-7
"""One rounding to float32 of the delta."""

ORIGINAL = {
    "blocks.1.attn1.to_q": "blocks.1.self_attn.q",
    "blocks.0.attn1.to_out.0": "blocks.0.self_attn.o",
    "blocks.2.attn2.to_k": "blocks.2.cross_attn.k",
    "blocks.0.ffn.net.0.proj": "blocks.0.ffn.0",
    "blocks.1.ffn.net.2": "blocks.1.ffn.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
    "patch_embedding": "patch_embedding",
}

Tensors = dict[str, np.ndarray]


def underscored(name: str) -> str:
    return name.replace(".", "_")


Spell = Callable[[str], str]
DIFFUSERS = ("lora_A.weight", "lora_B.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")

LAYOUTS: Mapping[str, tuple[Spell, tuple[str, str], bool]] = {
    "diffusers": (lambda m: f"transformer.{m}", DIFFUSERS, False),
    "no prefix": (lambda m: m, DIFFUSERS, False),
    "peft": (lambda m: f"base_model.model.{m}", DIFFUSERS, False),
    "peft, named": (
        lambda m: f"base_model.model.{m}",
        ("lora_A.default.weight", "lora_B.default.weight"),
        True,
    ),
    "diffusers, alpha": (lambda m: f"transformer.{m}", KOHYA, True),
    "original, A and B": (lambda m: f"diffusion_model.{ORIGINAL[m]}", DIFFUSERS, False),
    "original": (lambda m: f"diffusion_model.{ORIGINAL[m]}", KOHYA, True),
    "original, long": (
        lambda m: f"model.diffusion_model.{ORIGINAL[m]}",
        ("lora.down.weight", "lora.up.weight"),
        True,
    ),
    "kohya": (lambda m: f"lora_unet_{underscored(ORIGINAL[m])}", KOHYA, True),
    "kohya, diffusers": (lambda m: f"lora_unet_{underscored(m)}", KOHYA, False),
    "lycoris": (lambda m: f"lycoris_{underscored(ORIGINAL[m])}", KOHYA, True),
}
"""How a module is spelled, the names of its down and up matrices, and whether there is an alpha."""


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def pair(rng: np.random.Generator, module: str, rank: int = RANK) -> tuple[np.ndarray, np.ndarray]:
    """(down, up) of a module; those of a convolution are convolutions."""
    shape = SHAPES[f"{module}.weight"]
    ones = (1,) * (len(shape) - 2)
    return normal(rng, rank, *shape[1:]), normal(rng, shape[0], rank, *ones)


def product(down: np.ndarray, up: np.ndarray) -> np.ndarray:
    rank = len(down)
    flat = up.astype(np.float64).reshape(-1, rank) @ down.astype(np.float64).reshape(rank, -1)
    return flat.reshape(len(up), *down.shape[1:])


def lora(layout: str = "original", seed: int = 0) -> tuple[Tensors, dict[str, np.ndarray]]:
    """A LoRA in a layout, and the deltas it means in float64 by the model's key."""
    spell, (down_name, up_name), with_alpha = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    tensors, expected = {}, {}
    for module in ORIGINAL:
        down, up = pair(rng, module)
        tensors |= {f"{spell(module)}.{down_name}": down, f"{spell(module)}.{up_name}": up}
        if with_alpha:
            tensors[f"{spell(module)}.alpha"] = np.float32(ALPHA)
        expected[f"{module}.weight"] = product(down, up) * (ALPHA / RANK if with_alpha else 1)
    return tensors, expected


def write(folder: Path, tensors: Mapping[str, Any], name: str = "lora.safetensors", **metadata: str) -> Path:
    folder.mkdir(exist_ok=True)
    arrays = {key: np.ascontiguousarray(value).reshape(np.shape(value)) for key, value in tensors.items()}
    save_file(arrays, folder / name, metadata=metadata or None)
    return folder / name


def opened(path: Path, scale: float = 1.0) -> Loras:
    return open_loras([LoraRequest(path, scale)], {"transformer": SHAPES})


def dense(delta: Delta, shape: tuple[int, ...], block: int = 1000) -> np.ndarray:
    """A delta as a whole, taken block by block, float32."""
    values = np.zeros(int(np.prod(shape)), np.float32)
    for start in range(0, values.size, block):
        delta.add_to(values[start : start + block], start)
    return values.reshape(shape)


def assert_deltas(path: Path, expected: Mapping[str, np.ndarray], scale: float = 1.0) -> None:
    with opened(path, scale) as loras:
        deltas = loras.deltas("transformer")
        assert deltas.keys() == expected.keys()
        for key, value in expected.items():
            found = dense(deltas[key], SHAPES[key])
            error = np.abs(found - scale * value.reshape(found.shape)).max() / np.abs(scale * value).max()
            assert error < PRECISION, (key, error)


Q, K = "blocks.0.attn1.to_q", "blocks.1.attn1.to_k"


def two_modules(prefix: str = "transformer.") -> tuple[Tensors, dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    tensors, products = {}, {}
    for module, rank in ((Q, 4), (K, 2)):
        down, up = pair(rng, module, rank)
        tensors |= {f"{prefix}{module}.lora_A.weight": down, f"{prefix}{module}.lora_B.weight": up}
        products[f"{module}.weight"] = product(down, up)
    return tensors, products


def refused(path: Path, *named: object) -> None:
    """Opening the file is refused, and the line names it and these values."""
    with pytest.raises(SourceError) as caught:
        opened(path)
    message = str(caught.value)
    assert caught.value.code == "unsupported" and "\n" not in message
    for value in (path.name, *named):
        assert str(value) in message, (value, message)
