"""LoRAs: every layout against the delta computed in float64 by hand, the bits of the merge, refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.damage import one_error
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.lora.deltas import Delta
from wanbuild.lora.merge import LoraRequest, Loras, misplaced, open_loras, parse_lora_file
from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_configs import TOY_TRANSFORMER
from wancli.console import run
from wanrun.errors import SourceError, UsageError

SHAPES = component_shapes("transformer", TOY_TRANSFORMER)
RANK, ALPHA = 4, 6.5
PRECISION = 1e-7  # one rounding to float32 of the delta

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


# (prefix and spelling of a module, down, up, whether there is an alpha)
LAYOUTS: Mapping[str, tuple[Callable[[str], str], str, str, bool]] = {
    "diffusers": (lambda m: f"transformer.{m}", "lora_A.weight", "lora_B.weight", False),
    "no prefix": (lambda m: m, "lora_A.weight", "lora_B.weight", False),
    "peft": (lambda m: f"base_model.model.{m}", "lora_A.weight", "lora_B.weight", False),
    "peft, named": (
        lambda m: f"base_model.model.{m}",
        "lora_A.default.weight",
        "lora_B.default.weight",
        True,
    ),
    "diffusers, alpha": (lambda m: f"transformer.{m}", "lora_down.weight", "lora_up.weight", True),
    "original, A and B": (
        lambda m: f"diffusion_model.{ORIGINAL[m]}",
        "lora_A.weight",
        "lora_B.weight",
        False,
    ),
    "original": (lambda m: f"diffusion_model.{ORIGINAL[m]}", "lora_down.weight", "lora_up.weight", True),
    "original, long": (
        lambda m: f"model.diffusion_model.{ORIGINAL[m]}",
        "lora.down.weight",
        "lora.up.weight",
        True,
    ),
    "kohya": (lambda m: f"lora_unet_{underscored(ORIGINAL[m])}", "lora_down.weight", "lora_up.weight", True),
    "kohya, diffusers": (
        lambda m: f"lora_unet_{underscored(m)}",
        "lora_down.weight",
        "lora_up.weight",
        False,
    ),
    "lycoris": (lambda m: f"lycoris_{underscored(ORIGINAL[m])}", "lora_down.weight", "lora_up.weight", True),
}


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
    spell, down_name, up_name, with_alpha = LAYOUTS[layout]
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


# --- layouts ----------------------------------------------------------------------------------------------


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

Q, K = "blocks.0.attn1.to_q", "blocks.1.attn1.to_k"


def two_modules(prefix: str = "transformer.") -> tuple[Tensors, dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    tensors, products = {}, {}
    for module, rank in ((Q, 4), (K, 2)):
        down, up = pair(rng, module, rank)
        tensors |= {f"{prefix}{module}.lora_A.weight": down, f"{prefix}{module}.lora_B.weight": up}
        products[f"{module}.weight"] = product(down, up)
    return tensors, products


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
    message = refusal(write(tmp_path, tensors, lora_adapter_metadata=json.dumps(CONFIG)))
    assert "scale 1" in message and "configuration 2.5" in message


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "LOKR"}, "peft_type is 'LOKR'"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base weights"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"r": 0}, "r is 0"),
        ({"r": 8}, f"{Q} has rank 4"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "regular expression"),
        ({"alpha_pattern": {K: "3"}}, "is '3'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ],
)
def test_a_configuration_that_is_not_understood(change: dict[str, Any], phrase: str, tmp_path: Path) -> None:
    metadata = json.dumps({**CONFIG, **change})
    assert phrase in refusal(write(tmp_path, two_modules()[0], lora_adapter_metadata=metadata))


def test_configurations_that_are_no_json_or_missing(tmp_path: Path) -> None:
    tensors, _ = two_modules("base_model.model.")
    assert "not JSON" in refusal(write(tmp_path, tensors, lora_adapter_metadata="{"))
    assert "a JSON object" in refusal(write(tmp_path, tensors, lora_adapter_metadata="[]"))
    assert "adapter_config.json" in refusal(write(tmp_path, tensors, "adapter_model.safetensors"))


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


# --- several LoRAs, two experts ---------------------------------------------------------------------------


def test_loras_add_up_in_order(tmp_path: Path) -> None:
    (first, a), (second, b) = lora("original", 1), lora("kohya", 2)
    del second["lora_unet_head_head.lora_down.weight"]
    del second["lora_unet_head_head.lora_up.weight"], second["lora_unet_head_head.alpha"]
    requests = [
        LoraRequest(write(tmp_path, first, "1.safetensors"), 0.5),
        LoraRequest(write(tmp_path, second, "2.safetensors"), -2),
    ]
    with open_loras(requests, {"transformer": SHAPES}) as loras:
        for key, delta in loras.deltas("transformer").items():
            expected = 0.5 * a[key] - 2 * (b[key] if key != "proj_out.weight" else 0)
            assert np.abs(dense(delta, SHAPES[key]) - expected).max() < PRECISION * np.abs(expected).max()
        assert [(record.file, record.scale) for record in loras.records] == [
            ("1.safetensors", 0.5),
            ("2.safetensors", -2),
        ]


def test_a_lora_of_one_expert_and_one_of_both(tmp_path: Path) -> None:
    shapes = {"transformer": SHAPES, "transformer_2": SHAPES}
    both, low = (
        write(tmp_path, lora(seed=1)[0], "both.safetensors"),
        write(tmp_path, two_modules()[0], "low.safetensors"),
    )
    requests = [LoraRequest(both), LoraRequest(low, 0.5, "transformer_2")]
    with open_loras(requests, shapes) as loras:
        assert loras.deltas("transformer").keys() == lora()[1].keys()
        assert loras.deltas("transformer_2").keys() == lora()[1].keys() | two_modules()[1].keys()
        assert [record.component for record in loras.records] == [None, "transformer_2"]
        assert all(len(record.sha256) == 64 for record in loras.records)
        assert str(tmp_path) not in str(loras.records)
    with refuses("no_effect", what="low.safetensors", expected="transformer", remedy="--lora"):
        open_loras(requests, {"transformer": SHAPES})


def test_no_loras() -> None:
    loras = open_loras([], {"transformer": SHAPES})
    assert not loras.deltas("transformer") and loras.records == ()


# --- what is refused --------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        opened(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


GOOD = "diffusion_model.blocks.0.self_attn.q"
DOWN, UP = np.full((4, 40), 0.5, np.float32), np.full((40, 4), 0.25, np.float32)
NAN = np.where(np.arange(160).reshape(40, 4) == 77, np.float32("nan"), UP)

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "dora": ({f"{GOOD}.dora_scale": UP[:, :1]}, "DoRA .*tool that made it, or extract a plain LoRA"),
    "dora of peft": ({f"{GOOD}.lora_magnitude_vector.weight": UP[:, 0]}, "DoRA"),
    "loha": ({f"{GOOD}.hada_w1_a": UP}, "LoHa"),
    "lokr": ({f"{GOOD}.lokr_w1": UP}, "LoKr"),
    "tucker": ({f"{GOOD}.lora_mid.weight": UP}, "middle matrix"),
    "text encoder": ({"lora_te1_encoder_block_0.lora_down.weight": DOWN}, "a text encoder's LoRA"),
    "text encoder of diffusers": (
        {"text_encoder.encoder.block.0.q.lora_A.weight": DOWN},
        "a text encoder's LoRA",
    ),
    "another model": (
        {"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": DOWN},
        r"it changes nothing: 1 tensor is of layers that this model lacks: double_blocks\.\*\.img_attn\.qkv",
    ),
    "past the last block": (
        {"diffusion_model.blocks.3.self_attn.q.lora_down.weight": DOWN},
        r"it changes nothing: .*blocks\.\*\.self_attn\.q",
    ),
    "a checkpoint": (
        {"diffusion_model.blocks.0.self_attn.q.weight": NAN},
        "is a transformer in the original naming, not a LoRA; give it as --transformer$",
    ),
    "a VAE": ({"decoder.middle.0.residual.0.gamma": DOWN}, "is the VAE .*, not a LoRA; give it as --vae$"),
    "a bias where there is none": (
        {"diffusion_model.blocks.0.self_attn.norm_q.diff_b": UP[:, 0]},
        "it changes nothing",
    ),
    "matrices of a table": (
        {"diffusion_model.blocks.0.modulation.lora_up.weight": UP},
        "it changes nothing",
    ),
    "no module": (
        {"diffusion_model.lora_up.weight": UP, "alpha": np.float32(1)},
        "it changes nothing: 2 tensors",
    ),
    "alpha of another name": (
        {f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": UP, "x.alpha": np.float32(4)},
        "x.alpha is there, and the matrices are not",
    ),
    "no up": ({f"{GOOD}.lora_down.weight": DOWN}, "lora_down.weight is there, and the up matrix is not"),
    "no down": ({f"{GOOD}.lora_up.weight": UP}, "lora_up.weight is there, and the down matrix is not"),
    "alpha alone": ({f"{GOOD}.alpha": np.float32(4)}, "alpha is there, and the matrices are not"),
    "bias alone": ({f"{GOOD}.lora_up.bias": UP[:, 0]}, "lora_up.bias is there, and the matrices are not"),
    "ranks differ": (
        {f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": UP[:, :3]},
        r"\[4, 40\] and lora_up \[40, 3\] do not make .*to_q.weight, which has shape \[40, 40\]",
    ),
    "another size": (
        {f"{GOOD}.lora_down.weight": DOWN[:, :30], f"{GOOD}.lora_up.weight": UP[:30]},
        r"a model that is 30 wide, and this one is 40 wide: 1 of the 1 weights",
    ),
    "rank 0": ({f"{GOOD}.lora_down.weight": DOWN[:0], f"{GOOD}.lora_up.weight": UP[:, :0]}, "do not make"),
    "no axes": (
        {f"{GOOD}.lora_down.weight": np.float32(1), f"{GOOD}.lora_up.weight": np.float32(1)},
        "do not make",
    ),
    "matrices of a norm": (
        {
            "diffusion_model.blocks.0.norm3.lora_down.weight": DOWN[:, :1],
            "diffusion_model.blocks.0.norm3.lora_up.weight": UP,
        },
        "do not make",
    ),
    "a delta of another shape": (
        {f"{GOOD}.diff": DOWN},
        r"another shape, such as blocks.0.attn1.to_q.weight, \[40, 40\] and not \[4, 40\]",
    ),
    "alpha zero": (
        {f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": UP, f"{GOOD}.alpha": np.float32(0)},
        "alpha is 0",
    ),
    "alpha not finite": (
        {f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": UP, f"{GOOD}.alpha": np.float32("inf")},
        "alpha is inf",
    ),
    "alpha of two numbers": (
        {f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": UP, f"{GOOD}.alpha": UP[0, :2]},
        "not one number",
    ),
    "nan": ({f"{GOOD}.lora_down.weight": DOWN, f"{GOOD}.lora_up.weight": NAN}, "lora_up.weight has NaN"),
    "infinity": ({f"{GOOD}.diff_b": np.full(40, np.inf, np.float16)}, "diff_b has NaN or infinity"),
    "quantized": (
        {f"{GOOD}.lora_down.weight": DOWN.astype(ml_dtypes.float8_e4m3fn), f"{GOOD}.lora_up.weight": UP},
        "lora_down.weight is F8_E4M3",
    ),
    "integers": ({f"{GOOD}.diff_b": np.ones(40, np.int8)}, "diff_b is I8"),
    "twice": (
        {
            f"{GOOD}.lora_down.weight": DOWN,
            f"{GOOD}.lora_up.weight": UP,
            "transformer.blocks.0.attn1.to_q.lora_A.weight": DOWN,
        },
        "are both the down matrix of blocks.0.attn1.to_q.weight",
    ),
    "empty": ({}, "holds no tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, pattern = REFUSED[case]
    with pytest.raises(SourceError, match=pattern):
        opened(write(tmp_path, tensors))
    refusal(write(tmp_path, tensors))


def test_extreme_scales(tmp_path: Path) -> None:
    tensors, expected = lora("diffusers")
    tiny = {key: (value * np.float32(1e-38 if "lora_A" in key else 1)) for key, value in tensors.items()}
    with opened(write(tmp_path, tiny), 1e38) as loras:
        for key, delta in loras.deltas("transformer").items():
            error = np.abs(dense(delta, SHAPES[key]) - expected[key]).max()
            assert error < 1e-6 * np.abs(expected[key]).max()  # subnormal numbers have fewer bits
    with opened(write(tmp_path, tensors), 0.0) as loras:
        for key, delta in loras.deltas("transformer").items():
            assert not dense(delta, SHAPES[key]).any()


def of_i2v_2_1(rng: np.random.Generator) -> Tensors:
    """The tensors of lightx2v's own LoRAs for Wan 2.2 that only Wan 2.1's image-to-video has layers for."""
    tensors: Tensors = {"diffusion_model.img_emb.proj.0.diff_b": normal(rng, 40)}
    for i in range(3):
        name = f"diffusion_model.blocks.{i}.cross_attn"
        tensors[f"{name}.norm_k_img.diff"] = normal(rng, 40)
        for one in ("k_img", "v_img"):
            tensors |= {f"{name}.{one}.lora_down.weight": DOWN, f"{name}.{one}.lora_up.weight": UP}
            tensors[f"{name}.{one}.diff_b"] = normal(rng, 40)
    return tensors


def test_layers_that_the_model_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    others = of_i2v_2_1(np.random.default_rng(3))
    tensors, expected = lora()
    path = write(tmp_path, {**tensors, **others})
    assert_deltas(path, expected)
    both = {"transformer": SHAPES, "transformer_2": SHAPES}
    with open_loras([LoraRequest(path, 0.5)], both) as loras:
        ((record,), (line,)) = loras.records, loras.lines
    assert record.left_out == len(others) == 22
    for part in (str(record), record.sha256, "changes 20 weights", f"22 of its {len(tensors) + 22} tensors"):
        assert part in line
    layers = ("blocks.*.cross_attn.k_img", "blocks.*.cross_attn.norm_k_img", "img_emb.proj.*")
    assert all(layer in line for layer in layers)
    with pytest.raises(SourceError, match=r"22 tensors.*--strict"):
        open_loras([LoraRequest(path)], both, strict=True)
    open_loras([LoraRequest(write(tmp_path, tensors))], both, strict=True).close()


def test_a_lora_of_another_width_is_one_short_line(tmp_path: Path) -> None:
    large = component_shapes("transformer", {**TOY_TRANSFORMER, "num_attention_heads": 4, "num_layers": 4})
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(4):
        for one in "qkvo":
            rows, columns = large[f"blocks.{i}.attn1.to_q.weight"]
            name = f"diffusion_model.blocks.{i}.self_attn.{one}"
            tensors[f"{name}.lora_down.weight"] = normal(rng, 4, columns)
            tensors[f"{name}.lora_up.weight"] = normal(rng, rows, 4)
    path = write(tmp_path, tensors)
    with pytest.raises(SourceError) as caught:
        open_loras([LoraRequest(path)], {"transformer": SHAPES, "transformer_2": SHAPES})
    message = str(caught.value)
    assert all(part in message for part in ("is 80 wide", "is 40 wide", "12 of the 12"))
    assert len(message) < 400 and "\n" not in message


def test_all_problems_of_all_files_are_one_error(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, REFUSED["no up"][0], "1.safetensors"),
        write(tmp_path, REFUSED["nan"][0], "2.safetensors"),
        tmp_path / "3.pt",
        tmp_path / "4.safetensors",
        write(tmp_path, {**REFUSED["twice"][0], **REFUSED["another model"][0]}, "5.safetensors"),
    ]
    paths[2].write_bytes(b"PK")
    paths[3].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(SourceError) as caught:
        open_loras([LoraRequest(path) for path in paths], {"transformer": SHAPES})
    message = str(caught.value)
    for phrase in ("1.safetensors: ", "2.safetensors is", "3.pt is a pickled", "4.safetensors is cut off"):
        assert phrase in message
    assert "down matrix" in message and "1 tensor is" not in message


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    with refuses("missing_file", what=tmp_path / "none.safetensors"):
        opened(tmp_path / "none.safetensors")
    with refuses("out_of_range", what="nan", expected="finite"):
        opened(write(tmp_path, lora()[0]), scale=float("nan"))
    with refuses("unsupported", SourceError, what=" 1.6"):
        opened(write(tmp_path, lora()[0]), scale=1e300)


def test_parse_lora(tmp_path: Path) -> None:
    assert parse_lora_file("a/b.safetensors") == (Path("a/b.safetensors"), 1.0)
    assert parse_lora_file("a/b.safetensors:0.8") == (Path("a/b.safetensors"), 0.8)
    assert parse_lora_file("b:-1e-1") == (Path("b"), -0.1)
    assert parse_lora_file("c:d.safetensors:2") == (Path("c:d.safetensors"), 2.0)
    (tmp_path / "e:2").touch()
    assert parse_lora_file(f"{tmp_path}/e:2") == (tmp_path / "e:2", 1.0)
    assert parse_lora_file(f"{tmp_path}/e:2:3") == (tmp_path / "e:2", 3.0)
    for text in ("a:", ":1", "a:b", "a:nan", "a:inf", "a:1:x", "a:high=1,low=0.5"):
        with pytest.raises(UsageError, match="FILE:SCALE"):
            parse_lora_file(text)


@pytest.mark.parametrize(
    ("name", "component", "said"),
    [
        ("wan2.2_i2v_A14b_high_noise_lora_rank64.safetensors", "transformer_2", "low-noise .* says high"),
        ("Seko-V1/low_noise_model.safetensors", "transformer", "high-noise .* says low"),
        ("HighNoise/pytorch_lora_weights.safetensors", "transformer_2", "low-noise .* says high"),
        ("wan22-low.safetensors", "transformer", "high-noise .* says low"),
        ("high_noise_model.safetensors", "transformer", None),
        ("high_noise_model.safetensors", None, "into both experts; its name says high: use --lora-high"),
        ("slow_motion.safetensors", "transformer", None),
        ("low_rank_of_high_noise.safetensors", "transformer", None),
    ],
)
def test_a_file_of_the_other_expert(name: str, component: str | None, said: str | None) -> None:
    other = LoraRequest(Path("x.safetensors"))
    found = list(
        misplaced([LoraRequest(Path(name), 1.0, component), other], ("transformer", "transformer_2"))
    )
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


def test_loras_of_one_expert() -> None:
    low = LoraRequest(Path("low_noise_model.safetensors"))
    (line,) = misplaced([low], ("transformer",))
    assert "low-noise expert" in line and str(low.path) in line
    given = LoraRequest(low.path, 1.0, "transformer_2")
    (line,) = misplaced([given], ("transformer", "transformer_2"))
    assert "low-noise expert" in line


# --- converting -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_digest_does_not_depend_on_threads_or_blocks(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, lora()[0])

    def digest(name: str, **options: Any) -> str:
        return convert(ConvertRequest(str(toy_checkpoint), tmp_path / name, **options)).content_digest

    first = digest("1", loras=[LoraRequest(path, 0.5)], threads=1)
    assert digest("2", loras=[LoraRequest(path, 0.5)], threads=3) == first
    monkeypatch.setattr(writer_module, "BLOCK_ITEMS", 100)
    assert digest("3", loras=[LoraRequest(path, 0.5)]) == first
    assert digest("4", loras=[LoraRequest(path, 0.6)]) != first
    assert digest("5") != first


@pytest.mark.slow
def test_the_command_line(toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, artifact = write(tmp_path, lora()[0]), tmp_path / "artifact"
    arguments = ["convert", str(toy_checkpoint), "--artifact", str(artifact)]
    assert run(wanbuild, [*arguments, "--lora", f"{path}:x"]) == 2
    assert "FILE:SCALE" in one_error(capsys)
    assert run(wanbuild, [*arguments, "--lora-low", str(path)]) == 2
    assert "use --lora" in one_error(capsys)
    bad = write(tmp_path, REFUSED["another model"][0], "bad.safetensors")
    assert run(wanbuild, [*arguments, "--lora", str(path), "--lora", str(bad)]) == 4
    assert "it changes nothing" in one_error(capsys)
    assert not artifact.exists() and not list(tmp_path.glob(".*"))
    assert run(wanbuild, [*arguments, "--lora", f"{path}:0.5", "--lora", str(path)]) == 0
    records = json.loads((artifact / "manifest.json").read_text())["loras"]
    assert [(record["file"], record["scale"]) for record in records] == [(path.name, 0.5), (path.name, 1.0)]
    assert str(tmp_path) not in json.dumps(records)
    said = f"LoRA {path.name} at strength 0.5: changes 10 weights; sha256 {records[0]['sha256']}"
    assert said in capsys.readouterr().out.splitlines()
    assert run(wanbuild, ["inspect", str(artifact)]) == 0
    said = f"LoRA            {path.name} at strength 0.5, sha256 {records[0]['sha256']}"
    assert said in capsys.readouterr().out.splitlines()
    assert run(wanbuild, [*arguments, "--force", "--strict", "--lora", str(path)]) == 0
