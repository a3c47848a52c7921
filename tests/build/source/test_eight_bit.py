"""Weights of 8 bits, in single files and in a folder of NVIDIA ModelOpt: dequantised, kept or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoint_files import State, save_file
from helpers.hub_server import read_folder
from helpers.naive_conversion import arrays_of
from helpers.refusals import refuses
from helpers.single_files import (
    original_text_encoder,
    original_transformer,
    state_of,
)
from hostile.refusal import check_named
from wanbuild.build import convert
from wanbuild.conversion.chosen import Quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.lora.merge import LoraRequest
from wanbuild.source.single_files import open_files
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError

# --- in single files ---


def quantized(
    state: State, rows: bool, names: tuple[str, str], dtype: Any = ml_dtypes.float8_e4m3fn
) -> tuple[State, State]:
    """The tensors with 8-bit linear weights and their scales, and what they stand for."""
    small: State = {} if dtype is np.int8 else {"scaled_fp8": np.zeros(2, dtype)}
    large: State = {}
    most = 127 if dtype is np.int8 else 448
    for key, value in state.items():
        small[key] = large[key] = value
        if value.ndim != 2 or not key.endswith(".weight"):
            continue
        scale = np.abs(value).max(axis=1 if rows else None, keepdims=True).astype(np.float32) / most
        small[key] = (np.rint(value / scale) if dtype is np.int8 else value / scale).astype(dtype)
        large[key] = small[key].astype(np.float32) * scale
        base = key.removesuffix(".weight")
        small[base + names[0]] = scale if rows else scale.reshape(())
        small[base + names[1]] = np.ones((), np.float32)
    return small, large


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "names", "dtype"),
    [
        (False, (".scale_weight", ".scale_input"), ml_dtypes.float8_e4m3fn),
        (False, (".weight_scale", ".input_scale"), ml_dtypes.float8_e4m3fn),
        (True, (".weight_scale", ".input_scale"), ml_dtypes.float8_e4m3fn),
        (False, (".scale_weight", ".scale_input"), ml_dtypes.float8_e5m2),
        (False, (".weight_scale", ".input_scale"), np.int8),  # ComfyUI's int8_tensorwise
        (True, (".weight_scale", ".input_scale"), np.int8),  # LightX2V's int8
    ],
)
def test_scaled_weights_are_dequantised(
    rows: bool,
    names: tuple[str, str],
    dtype: Any,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    files = dict(text_files)
    checkpoint = Path(shutil.copytree(text_checkpoint, tmp_path / "checkpoint"))
    makers = {"transformer": original_transformer, "text_encoder": original_text_encoder}
    for name, make in makers.items():
        small, large = quantized(make(checkpoint / name), rows, names, dtype)
        files[name] = tmp_path / f"{name}_scaled.safetensors"
        save_file(small, files[name])
        for file in (checkpoint / name).glob("*.safetensors*"):
            file.unlink()
        save_file(large, checkpoint / name / "x.safetensors")
    expected = convert(ConvertRequest(checkpoint, tmp_path / "one"))
    lines: list[str] = []
    found = convert(ConvertRequest(None, tmp_path / "other", files=files), lambda *said: lines.extend(said))
    assert len(lines) == 2 and all("of bfloat16" in line and "--quantise source" in line for line in lines)
    assert read_folder(tmp_path / "one" / "weights") == read_folder(tmp_path / "other" / "weights")
    assert found.components == expected.components
    digests = [manifest.source["files"] for manifest in (found, expected)]
    assert digests[0] != digests[1]
    kept = convert(ConvertRequest(None, tmp_path / "kept", files=files, quantise=Quantise("source")))
    assert kept.dtypes["transformer"].eight_bit.keys() >= {"blocks/ffn/up", "blocks/attn2/to_k"}
    for name in makers:
        assert set(kept.dtypes[name].eight_bit.values()) == {np.dtype(dtype).name}
        stored, cast = (arrays_of(tmp_path / folder, name) for folder in ("kept", "other"))
        for layer in kept.dtypes[name].eight_bit:
            weight = stored.pop(f"{layer}/weight").astype(np.float32)
            values = (weight * stored.pop(f"{layer}/scale")[..., None]).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(values, cast.pop(f"{layer}/weight"))
        assert stored.keys() == cast.keys()


LAYER = "blocks.0.ffn.0"


def about(**layer: Any) -> np.ndarray:
    """What ComfyUI's newer files have as the tensor X.comfy_quant."""
    return np.frombuffer(json.dumps(layer).encode(), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "found"),
    [
        ({"format": "int8_tensorwise"}, None),
        ({"format": "int8_tensorwise", "full_precision_matrix_mult": True, "convrot": False}, None),
        (
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
            "int8_tensorwise with convrot",
        ),
        ({"format": "float8_e4m3fn"}, "the format float8_e4m3fn and I8"),
        *(
            ({"format": form}, f"the format {form}")
            for form in ("nvfp4", "mxfp8", "awq_w4a16", "asym_w4a8_int8")
        ),
        ({"format": 3}, "the format without a name"),
        ({}, "the format without a name"),
    ],
)
def test_forms_are_read_or_refused_by_name(
    layer: dict[str, Any],
    found: str | None,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """In a tensor beside the weight, or in the file's metadata, whose names may lack the prefix."""
    prefix = "model.diffusion_model."
    state = original_transformer(text_checkpoint / "transformer", prefix)
    small, _ = quantized(state, True, (".weight_scale", ".input_scale"), np.int8)
    layers = {"format_version": "1.0", "layers": {LAYER: layer}}
    for name, tensors, metadata in (
        ("tensor", {**small, f"{prefix}{LAYER}.comfy_quant": about(**layer)}, None),
        ("metadata", small, {"_quantization_metadata": json.dumps(layers)}),
    ):
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors, file, metadata)
        files = {**text_files, "transformer": file}
        if found is None:
            with open_files(files):
                pass
        else:
            with refuses("unknown_name", SourceError, what=f"{LAYER}.weight in {file}", found=found):
                open_files(files)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"layers": 3}', "{}", "[" * 5000])
def test_metadata_that_are_none(
    text: str, text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    state = original_transformer(text_checkpoint / "transformer")
    save_file(state, tmp_path / "x.safetensors", {"_quantization_metadata": text})
    with refuses("unreadable", SourceError, what="_quantization_metadata", expected="JSON"):
        open_files({**text_files, "transformer": tmp_path / "x.safetensors"})


@pytest.mark.thorough
def test_weights_without_scales_are_cast(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    state = original_transformer(text_checkpoint / "transformer", "model.diffusion_model.")
    eight = {key: value.astype(ml_dtypes.float8_e4m3fn) for key, value in state.items()}
    for name, values in (("a", eight), ("b", {key: x.astype(np.float32) for key, x in eight.items()})):
        save_file(values, tmp_path / f"{name}.safetensors")
        files = {**text_files, "transformer": tmp_path / f"{name}.safetensors"}
        convert(ConvertRequest(None, tmp_path / name, files=files))
    assert read_folder(tmp_path / "a" / "weights") == read_folder(tmp_path / "b" / "weights")


@pytest.mark.slow
def test_a_lora_is_added_to_dequantised_weights(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    state = original_transformer(text_checkpoint / "transformer")
    small, large = quantized(state, True, (".weight_scale", ".input_scale"))
    rng, lora = np.random.default_rng(3), tmp_path / "lora.safetensors"
    width = large["blocks.1.self_attn.q.weight"].shape[0]
    module = "diffusion_model.blocks.1.self_attn.q"
    save_file(
        {
            f"{module}.lora_A.weight": rng.normal(size=(4, width)).astype(np.float32),
            f"{module}.lora_B.weight": rng.normal(size=(width, 4)).astype(np.float32),
        },
        lora,
    )
    for name, values in (("a", small), ("b", large)):
        save_file(values, tmp_path / f"{name}.safetensors")
        files = {**text_files, "transformer": tmp_path / f"{name}.safetensors"}
        convert(ConvertRequest(None, tmp_path / name, files=files, loras=[LoraRequest(lora, 0.5, None)]))
    assert read_folder(tmp_path / "a" / "weights") == read_folder(tmp_path / "b" / "weights")


ONE = np.ones((), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "code", "named"),
    [
        ("ffn.0.weight_scale", np.ones((2, 3), np.float32), "unknown_name", "[2, 3]"),
        ("norm3.weight_scale", ONE, "unknown_name", "F32 with blocks.0.norm3.weight_scale"),
        ("ffn.0.weight", np.ones((56, 256), np.uint8), "wrong_kind", "U8"),
        ("ffn.0.weight_scale_2", ONE, "unknown_name", "nvfp4"),
        ("ffn.0.weight_global_scale", ONE, "unknown_name", "nvfp4"),
        ("ffn.0.pre_quant_scale", np.ones(256, np.float32), "unknown_name", "awq"),
        ("ffn.0.weight_scale_inv", ONE, "wrong_kind", "weight_scale_inv"),
    ],
)
def test_other_ways_to_quantize_are_refused(
    name: str,
    value: np.ndarray,
    code: ErrorCode,
    named: str,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    state = original_transformer(text_checkpoint / "transformer")
    small, _ = quantized(state, False, (".weight_scale", ".input_scale"))
    save_file({**small, f"blocks.0.{name}": value}, tmp_path / "x.safetensors")
    with pytest.raises(SourceError) as caught:
        open_files({**text_files, "transformer": tmp_path / "x.safetensors"})
    check_named({"code": caught.value.code, "message": str(caught.value)}, code, (named,))


SCALE = "blocks.0.ffn.0.weight_scale"


def without(state: State, *ends: str) -> State:
    return {key: value for key, value in state.items() if not key.endswith(ends)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: without(state, "_scale"), "blocks.0.cross_attn.k.scale_weight"),
        (
            lambda state: without(state, "_scale", "scaled_fp8") | {"x.comfy_quant": np.zeros(2)},
            "blocks.0.cross_attn.k.weight",
        ),
        (lambda state: without(state, SCALE), "blocks.0.ffn.0.scale_weight"),
        (lambda state: without(state, SCALE, "scaled_fp8", "input_scale"), "blocks.0.ffn.0.weight"),
        (lambda state: state | {SCALE: np.float32(0)}, f"0 in {SCALE}"),
        (lambda state: state | {SCALE: np.float32(-0.01)}, f"-0.01 in {SCALE}"),
        (lambda state: state | {SCALE: np.float32(np.nan)}, f"nan in {SCALE}"),
        (lambda state: state | {SCALE: np.where(np.arange(56) == 7, np.inf, 1)}, f"inf in {SCALE}"),
    ],
    ids=["all", "all-but-marks", "one", "one-and-marks", "zero", "negative", "nan", "inf-in-a-row"],
)
def test_scales_that_are_missing_or_no_scales(
    change: Callable[[State], State],
    named: str,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """Taken for 1, they would give another model without a word."""
    state = original_transformer(text_checkpoint / "transformer")
    small, _ = quantized(state, False, (".weight_scale", ".input_scale"))
    made = {
        key: np.asarray(value, np.float32 if key == SCALE else None) for key, value in change(small).items()
    }
    save_file(made, tmp_path / "x.safetensors")
    with refuses("unknown_name", SourceError, expected="one positive scale") as caught:
        open_files({**text_files, "transformer": tmp_path / "x.safetensors"})
    assert named in str(caught.value)
    assert (
        "scale " in str(caught.value.found) if "in" in named.split() else "among" in str(caught.value.found)
    )


# --- a folder of ModelOpt: diffusers' names, and a field of the config ---

SAID = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "producer": {"name": "modelopt"},
    "ignore": ["proj_out"],
}


def exported(checkpoint: Path, folder: Path, said: Any) -> State:
    """Writes it, and returns the transformer's tensors as they are stored."""
    shutil.copytree(checkpoint, folder)
    transformer = folder / "transformer"
    state = state_of(transformer)
    for key in [key for key, value in state.items() if key.startswith("blocks.") and value.ndim == 2]:
        base = key.removesuffix(".weight")
        scale = np.float32(np.abs(state[key]).max() / 448)
        state[key] = (state[key] / scale).astype(ml_dtypes.float8_e4m3fn)
        state |= {f"{base}.weight_scale": np.asarray(scale), f"{base}.input_scale": np.ones((), np.float32)}
    for file in transformer.glob("*.safetensors*"):
        file.unlink()
    save_file(state, transformer / "diffusion_pytorch_model.safetensors")
    config = json.loads((transformer / "config.json").read_text())
    (transformer / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return state


@pytest.mark.slow
def test_a_folder_of_modelopt_is_read_and_kept(toy_checkpoint: Path, tmp_path: Path) -> None:
    state = exported(toy_checkpoint, tmp_path / "source", SAID)
    eight = {key for key, value in state.items() if value.dtype == ml_dtypes.float8_e4m3fn}
    plain = tmp_path / "plain"
    shutil.copytree(toy_checkpoint, plain)
    large = {
        key: value.astype(np.float32) * state[f"{key.removesuffix('.weight')}.weight_scale"]
        if key in eight
        else value
        for key, value in state.items()
        if not key.endswith("_scale")
    }
    for file in (plain / "transformer").glob("*.safetensors*"):
        file.unlink()
    save_file(large, plain / "transformer" / "diffusion_pytorch_model.safetensors")
    expected, found = (
        convert(ConvertRequest(tmp_path / name, tmp_path / f"{name}-artifact"))
        for name in ("plain", "source")
    )
    assert found.components == expected.components and found.configs == expected.configs
    kept = convert(ConvertRequest(tmp_path / "source", tmp_path / "kept", quantise=Quantise("source")))
    assert set(kept.dtypes["transformer"].eight_bit.values()) == {"float8_e4m3fn"}
    layers = kept.dtypes["transformer"].eight_bit
    assert len(layers) == len({key.split(".", 2)[2] for key in eight})
    stored, cast = (arrays_of(tmp_path / name, "transformer") for name in ("kept", "source-artifact"))
    for layer in layers:
        values = stored[f"{layer}/weight"].astype(np.float32) * stored[f"{layer}/scale"][..., None]
        np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16), cast[f"{layer}/weight"])
    weights = tmp_path / "source/transformer/diffusion_pytorch_model.safetensors"
    request = ConvertRequest(tmp_path / "plain", tmp_path / "file", files={"transformer": weights})
    assert convert(request).components == expected.components


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (SAID | {"quant_algo": "NVFP4"}, ["modelopt", "NVFP4"]),
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", None]),
        (3, 3),
    ],
)
def test_other_quantization_configs_are_refused_by_name(
    said: Any, found: object, toy_checkpoint: Path, tmp_path: Path
) -> None:
    exported(toy_checkpoint, tmp_path / "source", said)
    with refuses("unknown_name", SourceError, what="a quantization_config ", found=found):
        convert(ConvertRequest(tmp_path / "source", tmp_path / "artifact"))
