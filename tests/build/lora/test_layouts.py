"""Every layout of a LoRA against the delta computed in float64 by hand, scales, and the bits of the merge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.lora_files import (
    LAYOUTS,
    ORIGINAL,
    RANK,
    SHAPES,
    K,
    Q,
    assert_deltas,
    lora,
    normal,
    opened,
    pair,
    product,
    refused,
    two_modules,
    underscored,
    write,
)
from wanbuild.lora.merge import LoraRequest, open_loras


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_means_the_same(layout: str, tmp_path: Path) -> None:
    tensors, expected = lora(layout)
    assert_deltas(write(tmp_path, tensors), expected, scale=-0.7)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files(dtype: Any, tmp_path: Path) -> None:
    tensors, _ = lora("diffusers")
    rounded = {key: value.astype(dtype) for key, value in tensors.items()}
    expected = {
        f"{module}.weight": product(
            rounded[f"transformer.{module}.lora_A.weight"], rounded[f"transformer.{module}.lora_B.weight"]
        )
        for module in ORIGINAL
    }
    assert_deltas(write(tmp_path, rounded), expected)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64])
def test_alpha_of_every_dtype(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    down, up = pair(np.random.default_rng(0), "proj_out")
    tensors = {
        "diffusion_model.head.head.lora_down.weight": down,
        "diffusion_model.head.head.lora_up.weight": up,
        "diffusion_model.head.head.alpha": np.full(shape, 10, dtype),
    }
    assert_deltas(write(tmp_path, tensors), {"proj_out.weight": product(down, up) * 10 / RANK})


# Key of the file (after the prefix) -> key of the model.
FULL = {
    "blocks.0.norm3.diff": "blocks.0.norm2.weight",
    "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
    "blocks.1.self_attn.norm_q.diff": "blocks.1.attn1.norm_q.weight",
    "blocks.1.cross_attn.norm_k.diff": "blocks.1.attn2.norm_k.weight",
    "blocks.2.self_attn.o.diff_b": "blocks.2.attn1.to_out.0.bias",
    "blocks.2.ffn.0.diff": "blocks.2.ffn.net.0.proj.weight",
    "blocks.2.ffn.2.diff_b": "blocks.2.ffn.net.2.bias",
    "blocks.1.diff_m": "blocks.1.scale_shift_table",
    "blocks.2.modulation.diff": "blocks.2.scale_shift_table",
    "head.diff_m": "scale_shift_table",
    "head.head.diff": "proj_out.weight",
    "head.head.diff_b": "proj_out.bias",
    "patch_embedding.diff": "patch_embedding.weight",
    "patch_embedding.diff_b": "patch_embedding.bias",
    "time_projection.1.diff_b": "condition_embedder.time_proj.bias",
    "text_embedding.2.diff": "condition_embedder.text_embedder.linear_2.weight",
}


@pytest.mark.parametrize("spelling", ["diffusion_model.", "lora_unet_"])
def test_full_deltas(spelling: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    expected = {key: normal(rng, *SHAPES[key]) for key in FULL.values()}
    tensors = {}
    for name, key in FULL.items():
        module, _, kind = name.rpartition(".")
        spelled = f"{underscored(module)}.{kind}" if spelling == "lora_unet_" else name
        tensors[spelling + spelled] = expected[key]
    assert_deltas(write(tmp_path, tensors), expected, scale=1.5)


def test_a_flattened_convolution(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    (down, up), diff = pair(rng, "patch_embedding"), normal(rng, *SHAPES["patch_embedding.weight"])
    tensors = {
        "diffusion_model.patch_embedding.lora_down.weight": down.reshape(RANK, -1),
        "diffusion_model.patch_embedding.lora_up.weight": up.reshape(-1, RANK),
        "diffusion_model.patch_embedding.diff": diff.reshape(len(diff), -1),
    }
    assert_deltas(write(tmp_path, tensors), {"patch_embedding.weight": product(down, up) + diff})


def test_the_bias_of_an_up_matrix_has_its_scale_and_a_bias_delta_has_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    down, up = pair(rng, "proj_out")
    first, second = normal(rng, len(up)), normal(rng, len(up))
    tensors = {
        "transformer.proj_out.lora_A.weight": down,
        "transformer.proj_out.lora_B.weight": up,
        "transformer.proj_out.lora_B.bias": first,
        "transformer.proj_out.alpha": np.float32(2),
        "transformer.proj_out.diff_b": second,
    }
    expected = {"proj_out.weight": product(down, up) * 2 / RANK, "proj_out.bias": first * 2 / RANK + second}
    assert_deltas(write(tmp_path, tensors), expected, scale=3)


# --- scale from a configuration ---------------------------------------------------------------------------

CONFIG = {"r": 4, "lora_alpha": 10, "rank_pattern": {K: 2}, "alpha_pattern": {f"^{K}": 3}}


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        (CONFIG, (10 / 4, 3 / 2)),
        ({**CONFIG, "alpha_pattern": {}}, (10 / 4, 10 / 2)),
        ({**CONFIG, "alpha_pattern": {"attn1.to_q": 7, "to_k": 1.0}}, (7 / 4, 1 / 2)),
        ({**CONFIG, "alpha_pattern": {"o_q": 7, "^attn1.to_k": 1.0}}, (10 / 4, 10 / 2)),
        ({**CONFIG, "use_rslora": True}, (10 / 2, 3 / 2**0.5)),
    ],
)
def test_alpha_of_the_adapter_metadata(
    config: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    tensors, products = two_modules()
    expected = {f"{m}.weight": products[f"{m}.weight"] * s for m, s in zip((Q, K), scales, strict=True)}
    prefixed = json.dumps({f"transformer.{name}": value for name, value in config.items()})
    assert_deltas(write(tmp_path / "a", tensors, lora_adapter_metadata=prefixed), expected)
    plain = json.dumps({"peft_type": "LORA", "lora_dropout": 0.1, "use_dora": False, **config})
    assert_deltas(write(tmp_path / "b", tensors, lora_adapter_metadata=plain), expected)
    saved_by_peft = write(tmp_path / "c", two_modules("base_model.model.")[0], "adapter_model.safetensors")
    saved_by_peft.with_name("adapter_config.json").write_text(plain)
    assert_deltas(saved_by_peft, expected)
    with opened(saved_by_peft) as loras:
        assert len(loras.records[0].adapter_config_sha256) == 64


def test_alpha_in_both_places_must_agree(tmp_path: Path) -> None:
    tensors, products = two_modules()
    tensors |= {f"transformer.{Q}.alpha": np.float32(10), f"transformer.{K}.alpha": np.float32(3)}
    path = write(tmp_path, tensors, lora_adapter_metadata=json.dumps(CONFIG))
    assert_deltas(
        path, {f"{Q}.weight": products[f"{Q}.weight"] * 2.5, f"{K}.weight": products[f"{K}.weight"] * 1.5}
    )
    tensors[f"transformer.{Q}.alpha"] = np.float32(4)
    refused(write(tmp_path, tensors, lora_adapter_metadata=json.dumps(CONFIG)), "scale 1", 2.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "LOKR"}, "peft_type is 'LOKR'"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),  # it changes the base weights
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"r": 0}, "r is 0"),
        ({"r": 8}, f"{Q} has rank 4"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "'(a+)+$'"),  # a regular expression
        ({"alpha_pattern": {K: "3"}}, "is '3'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ],
)
def test_a_configuration_that_is_not_understood(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    metadata = json.dumps({**CONFIG, **change})
    refused(write(tmp_path, two_modules()[0], lora_adapter_metadata=metadata), named)


def test_configurations_that_are_no_json_or_missing(tmp_path: Path) -> None:
    tensors, _ = two_modules("base_model.model.")
    refused(write(tmp_path, tensors, lora_adapter_metadata="{"), "lora_adapter_metadata", "JSON")
    refused(write(tmp_path, tensors, lora_adapter_metadata="[]"), "lora_adapter_metadata", "[]")
    refused(write(tmp_path, tensors, "adapter_model.safetensors"), "adapter_config.json")


# --- the same bits on a machine ---------------------------------------------------------------------------

MERGED = """
import hashlib, pathlib, sys
import numpy as np
from wanbuild.lora.merge import LoraRequest, open_loras
path, block, *shape = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
values = np.zeros(np.prod(shape), np.float32)
with open_loras([LoraRequest(path, 0.3)], {"transformer": {"proj_out.weight": tuple(shape)}}) as loras:
    for start in range(0, values.size, block):
        loras.deltas("transformer")["proj_out.weight"].add_to(values[start : start + block], start)
print(hashlib.sha256(values).hexdigest())
"""


@pytest.mark.thorough
def test_bits_depend_on_neither_blocks_nor_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shape, rank = (150, 203), 64
    # Two halves that cancel but for a small part, so that any rounding of a partial sum shows.
    half, rows = normal(rng, rank, shape[1]), normal(rng, shape[0], rank)
    down = np.concatenate([half, half, normal(rng, rank, shape[1])])
    up = np.concatenate([rows * np.float32(2**36), rows * np.float32(-(2**36)), rows], axis=1)

    def merged(block: int, threads: int = 1, order: Any = slice(None)) -> str:
        path = write(
            tmp_path, {"proj_out.lora_A.weight": down[order], "proj_out.lora_B.weight": up[:, order]}
        )
        command = [sys.executable, "-c", MERGED, str(path), str(block), *map(str, shape)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
        return subprocess.run(command, env=environment, stdout=-1, text=True, check=True).stdout

    first = merged(10**6)
    assert merged(7) == merged(4096, threads=4) == merged(1000, threads=2) == first
    assert merged(1000, order=rng.permutation(3 * rank)) != first  # the test can tell


def test_memory_is_that_of_the_weights_being_written(tmp_path: Path) -> None:
    """Ten weights one after the other take no more than one, and opening takes less."""
    rng = np.random.default_rng(6)
    size, rank = 1024, 32
    shapes = {f"blocks.{i}.ffn.net.2.weight": (size, size) for i in range(10)}
    tensors = {}
    for key in shapes:
        module = key.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = normal(rng, rank, size).astype(np.float16)
        tensors[f"{module}.lora_B.weight"] = normal(rng, size, rank).astype(np.float16)
    path = write(tmp_path, tensors)
    block = np.zeros(2**17, np.float32)
    tracemalloc.start()
    try:
        with open_loras([LoraRequest(path)], {"transformer": shapes}) as loras:
            assert tracemalloc.get_traced_memory()[1] < 2.5e6
            for delta in loras.deltas("transformer").values():
                for start in range(0, size * size, block.size):
                    delta.add_to(block, start)
            held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    matrices = 2 * size * rank * 8
    assert peak < 3 * matrices + 64 * size * 8 + 2.5e6
    assert held < matrices
