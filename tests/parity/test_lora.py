"""LoRAs merged by conversion against diffusers' ``load_lora_weights`` and ``fuse_lora``, and PEFT's merge.

Through the command line, every parameter stored in float32, ranks 3 to 6 and alphas that are not the rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from helpers.naive import order_of_halves
from helpers.naive_conversion import arrays_of
from wanbuild.cli import wanbuild
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES
from wancli.console import run

# Relative to the largest value of each weight; seen: 2.4e-7. Both round the merged weight to float32.
TOLERANCE = 1e-6

Tensors = dict[str, torch.Tensor]

ORIGINAL: Mapping[str, str] = {
    **{
        f"blocks.{i}.{theirs}.{c}": f"blocks.{i}.{ours}.{o}"
        for i in range(3)
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for o, c in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    },
    **{f"blocks.{i}.ffn.net.0.proj": f"blocks.{i}.ffn.0" for i in range(3)},
    **{f"blocks.{i}.ffn.net.2": f"blocks.{i}.ffn.2" for i in range(3)},
}
OUTER: Mapping[str, str] = {
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "proj_out": "head.head",
}


@pytest.fixture(scope="module")
def weights(toy_checkpoint: Path) -> Tensors:
    (file,) = (toy_checkpoint / "transformer").glob("*.safetensors")
    return load_file(file)


Merged = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def merged(toy_checkpoint: Path, weights: Tensors, tmp_path: Path) -> Merged:
    """Converts with these options; the transformer as it is stored, by diffusers' keys."""

    def convert(*options: str) -> dict[str, np.ndarray]:
        artifact = tmp_path / "artifact"
        arguments = ["convert", str(toy_checkpoint), "--artifact", str(artifact), *options]
        assert run(wanbuild, [*arguments, "--weights-dtype", "float32"]) == 0
        flat = arrays_of(artifact, "transformer")
        config = json.loads((toy_checkpoint / "transformer/config.json").read_text())
        head_dim = config["attention_head_dim"]
        return {key: stored(flat, key, head_dim).reshape(value.shape) for key, value in weights.items()}

    return convert


def stored(flat: Mapping[str, np.ndarray], key: str, head_dim: int) -> np.ndarray:
    """The parameter that a checkpoint's key became, with its rows in the checkpoint's order."""
    for rule in TRANSFORMER_RULES:
        if match := re.fullmatch(rule.pattern, key):
            groups = match.groupdict()
            layer = groups.pop("layer", None)
            array = flat[rule.target.format(**groups)]
            array = array if layer is None else array[int(layer)]
            if re.search(r"attn1.*_[qk]\.", key):
                values = np.empty_like(array)
                values[order_of_halves(len(array), head_dim)] = array
                return values
            return array
    raise KeyError(key)


def assert_merged(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, torch.Tensor],
    base: Tensors,
    changed: Iterable[str],
) -> None:
    """Equal to the reference; the weights named are those that differ from the checkpoint's, no others."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        reference = value.detach().numpy()
        error = np.abs(found[key] - reference).max() / np.abs(reference).max()
        assert error < TOLERANCE, (key, error)
    differs = {key for key, value in found.items() if not np.array_equal(value, base[key].numpy())}
    assert differs == set(changed)
    for key in differs:  # by far more than the tolerance
        assert np.abs(found[key] - base[key].numpy()).max() > 1e-3 * np.abs(found[key]).max(), key


def fused(checkpoint: Path, loras: Iterable[tuple[Path, float]]) -> Tensors:
    """diffusers' transformer after every LoRA was loaded and fused, in order."""
    transformer = WanTransformer3DModel.from_pretrained(checkpoint / "transformer", torch_dtype=torch.float32)
    pipeline = WanPipeline(None, None, None, None, transformer)
    for file, scale in loras:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
        pipeline.fuse_lora(lora_scale=scale)
        pipeline.unload_lora_weights()
    return dict(transformer.state_dict())


def random_pair(weights: Tensors, module: str, rank: int, generator: torch.Generator) -> Tensors:
    rows, columns = weights[f"{module}.weight"].flatten(1).shape
    return {
        "down": torch.randn(rank, columns, generator=generator) / columns**0.5,
        "up": torch.randn(rows, rank, generator=generator),
    }


def lora(
    weights: Tensors,
    names: Mapping[str, str],
    spelling: tuple[str, str, str],
    alpha: float | None = None,
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Random matrices of every module: names are its names in the file, spelling the prefix, down and up."""
    prefix, down, up = spelling
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for module, name in names.items():
        pair = random_pair(weights, module, rank, generator)
        tensors[f"{prefix}{name}.{down}.weight"] = pair["down"].to(dtype)
        tensors[f"{prefix}{name}.{up}.weight"] = pair["up"].to(dtype)
        if alpha is not None:
            tensors[f"{prefix}{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    return tensors


def diffusers_layout(weights: Tensors) -> tuple[Tensors, dict[str, str], list[str]]:
    names = {module: module for module in (*ORIGINAL, *OUTER)}
    return lora(weights, names, ("transformer.", "lora_A", "lora_B")), {}, list(names)


def diffusers_metadata(weights: Tensors) -> tuple[Tensors, dict[str, str], list[str]]:
    """As ``save_lora_weights`` writes it: alpha by module, two ranks, and a convolution."""
    few = {module: module for module in (*list(ORIGINAL)[::3], *OUTER)}
    more = {module: module for module in ORIGINAL if module not in few}
    spelling = ("transformer.", "lora_A", "lora_B")
    tensors = lora(weights, few, spelling, rank=3) | lora(weights, more, spelling, rank=6)
    patch = weights["patch_embedding.weight"]
    generator = torch.Generator().manual_seed(9)
    tensors["transformer.patch_embedding.lora_A.weight"] = torch.randn(
        6, *patch.shape[1:], generator=generator
    )
    up = torch.randn(len(patch), 6, 1, 1, 1, generator=generator)
    tensors["transformer.patch_embedding.lora_B.weight"] = up
    config = peft.LoraConfig(
        r=6,
        lora_alpha=9,
        target_modules=[*few, *more, "patch_embedding"],
        rank_pattern={f"^{module}": 3 for module in few},
        alpha_pattern={f"^{module}": 2.5 for module in list(few)[::2]},
    ).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    metadata = {f"transformer.{name}": value for name, value in config.items()}
    text = json.dumps(metadata, default=lambda value: value.value)
    return tensors, {"lora_adapter_metadata": text}, [*few, *more, "patch_embedding"]


def original_layout(weights: Tensors) -> tuple[Tensors, dict[str, str], list[str]]:
    tensors = lora(weights, ORIGINAL, ("diffusion_model.", "lora_down", "lora_up"), alpha=10.0)
    return tensors, {}, list(ORIGINAL)


def original_outer(weights: Tensors) -> tuple[Tensors, dict[str, str], list[str]]:
    names = {**ORIGINAL, **OUTER}
    return lora(weights, names, ("diffusion_model.", "lora_A", "lora_B")), {}, list(names)


def musubi_layout(weights: Tensors) -> tuple[Tensors, dict[str, str], list[str]]:
    names = {module: name.replace(".", "_") for module, name in ORIGINAL.items()}
    spelling = ("lora_unet_", "lora_down", "lora_up")
    return lora(weights, names, spelling, alpha=1.0, dtype=torch.bfloat16), {}, list(names)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        (diffusers_layout, 1.0),
        (diffusers_metadata, -0.6),
        (original_layout, -0.6),
        (original_outer, 1.0),
        (musubi_layout, -0.6),
    ],
)
def test_a_layout_against_diffusers(
    layout: Callable[[Tensors], tuple[Tensors, dict[str, str], list[str]]],
    scale: float,
    weights: Tensors,
    merged: Merged,
    toy_checkpoint: Path,
    tmp_path: Path,
) -> None:
    tensors, metadata, modules = layout(weights)
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    option = str(file) if scale == 1 else f"{file}:{scale}"
    expected = fused(toy_checkpoint, [(file, scale)])
    assert_merged(merged("--lora", option), expected, weights, [f"{module}.weight" for module in modules])


def test_two_loras_and_bias_deltas(
    weights: Tensors, merged: Merged, toy_checkpoint: Path, tmp_path: Path
) -> None:
    """As extraction scripts write them: bias deltas beside the matrices, and the head's weight delta."""
    first = original_layout(weights)[0]
    second = lora(weights, ORIGINAL, ("diffusion_model.", "lora_down", "lora_up"), rank=5)
    generator = torch.Generator().manual_seed(1)
    for module, name in {**ORIGINAL, "proj_out": "head.head"}.items():
        second[f"diffusion_model.{name}.diff_b"] = torch.randn(
            weights[f"{module}.bias"].shape, generator=generator
        )
    second["diffusion_model.head.head.diff"] = torch.randn(
        weights["proj_out.weight"].shape, generator=generator
    )
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    save_file(first, files[0])
    save_file(second, files[1])
    found = merged("--lora", f"{files[0]}:0.5", "--lora", f"{files[1]}:2")
    changed = [f"{module}.{kind}" for module in (*ORIGINAL, "proj_out") for kind in ("weight", "bias")]
    assert_merged(found, fused(toy_checkpoint, [(files[0], 0.5), (files[1], 2.0)]), weights, changed)


# PEFT takes the bias of an up matrix for a part of a sharded one.
@pytest.mark.filterwarnings("ignore:Adapter .* have invalid shape")
def test_what_peft_saves(weights: Tensors, merged: Merged, toy_checkpoint: Path, tmp_path: Path) -> None:
    """adapter_model.safetensors beside adapter_config.json, rank-stabilised, with biases."""
    transformer = WanTransformer3DModel.from_pretrained(
        toy_checkpoint / "transformer", torch_dtype=torch.float32
    )
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["to_q", "net.2"], use_rslora=True, lora_bias=True
    )
    adapted = peft.PeftModel(transformer, config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    adapted.save_pretrained(tmp_path / "adapter")
    expected = dict(adapted.merge_and_unload().state_dict())
    found = merged("--lora", str(tmp_path / "adapter" / "adapter_model.safetensors"))
    modules = [module for module in ORIGINAL if module.endswith(("to_q", "net.2"))]
    assert_merged(found, expected, weights, [f"{m}.{kind}" for m in modules for kind in ("weight", "bias")])
