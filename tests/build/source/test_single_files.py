"""Checkpoints of single files, in the original naming and of 8-bit floats: the same artifact, or one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoint_files import State, save_file
from helpers.naive_conversion import arrays_of
from helpers.refusals import json_error, refuses
from helpers.single_files import (
    original_text_encoder,
    original_transformer,
    original_vae,
    write_single_files,
    write_with_published_heads,
)
from hostile.refusal import check_named
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.components import kind_of
from wanbuild.conversion.chosen import Quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.single_files import open_files
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.table import MODULES
from wancli.console import run
from wanrun.artifact.manifest import Manifest
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError

_NOT_ALONE = ("wan2.2-animate", "self-forcing-wan2.1", "helios-mid-wan2.1", "helios-distilled-wan2.1")

ALONE = [name for name in MODULES if name not in _NOT_ALONE]
"""Animate's motion encoder is of one published size, too large for a toy; Self-Forcing's are T2V's. Helios'
other models differ from its Base by their scheduler alone."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same(found: Manifest, expected: Manifest, artifacts: Path) -> None:
    """Two artifacts have the same bytes but for what says where they are from."""
    for part in ("weights", "tokenizer"):
        one, other = (contents(artifacts / name / part) for name in ("one", "other"))
        assert one == other and len(one) >= (50 if part == "weights" else 1)
    assert found.model == expected.model
    assert found.components == expected.components
    for name, config in expected.configs.items():
        if name != "scheduler":  # as published, with fields that have their defaults
            kind = kind_of(name, config.get("_class_name"))
            assert kind.parse(found.configs[name], "x") == kind.parse(config, "x")


# --- the same artifact -------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ALONE)
def test_files_alone_make_the_same_artifact(variant: str, tmp_path: Path) -> None:
    """Class, configs, boundary, scheduler and preprocessing follow from the tensors and what is published."""
    write_with_published_heads(tmp_path / "checkpoint", variant)
    _as_published(tmp_path / "checkpoint", variant)
    files = write_single_files(tmp_path / "checkpoint", tmp_path / "files", "model.diffusion_model.")
    expected = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "one"))
    found = convert(ConvertRequest(None, tmp_path / "other", files=files))
    assert_same(found, expected, tmp_path)
    names = {f"{name}/{path.name}" for name, path in files.items() if name != "tokenizer"}
    names |= {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert found.source["repository"] is None
    assert found.source["files"].keys() == names


def _as_published(checkpoint: Path, variant: str) -> None:
    """Gives a toy the published shift, and the published way to prepare images for its encoder."""
    from wanbuild.variants.table import variants

    scheduler = checkpoint / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text())
    config["shift" if "shift" in config else "flow_shift"] = variants()[variant].flow_shift
    scheduler.write_text(json.dumps(config))
    processor = checkpoint / "image_processor" / "preprocessor_config.json"
    if processor.exists():
        config = json.loads(processor.read_text())
        config["size"] = {"shortest_edge": config["crop_size"]["height"]}
        processor.write_text(json.dumps(config))


@pytest.mark.thorough
def test_one_file_takes_the_place_of_a_part(tmp_path: Path) -> None:
    """Animate's keys and values are one tensor in the original; the checkpoint's config says the sizes."""
    channels = {str(4 << power): 4 for power in range(8)}
    sizes = {"motion_encoder_size": 512, "motion_encoder_channel_sizes": channels}
    write_toy(tmp_path / "checkpoint", "wan2.2-animate", configs={"transformer": sizes})
    file = tmp_path / "animate.safetensors"
    save_file(original_transformer(tmp_path / "checkpoint" / "transformer"), file)
    expected = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "one"))
    for weights in (tmp_path / "checkpoint" / "transformer").glob("*.safetensors"):
        weights.unlink()
    request = ConvertRequest(tmp_path / "checkpoint", tmp_path / "other", files={"transformer": file})
    found = convert(request)
    assert_same(found, expected, tmp_path)
    assert "transformer/animate.safetensors" in found.source["files"]


@pytest.mark.slow
def test_options_and_recipes_name_the_files(
    text_files: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = [word for name, path in text_files.items() for word in (OPTIONS[name], str(path))]
    assert run(wanbuild, ["convert", "--artifact", str(tmp_path / "artifact"), *options]) == 0
    recognised, assumed, otherwise, converted = capsys.readouterr().out.splitlines()
    assert converted.startswith(f"converted {text_files['transformer']} to {tmp_path}/artifact: ")
    assert " wan2.1-t2v: " in recognised and len(re.findall(r" \d+ ", recognised)) == 2
    facts = assumed.partition(": ")[2]
    assert re.findall(r" \d+", facts) == [" 128", " 5"] and "UniPC" in facts
    assert "--config FOLDER" in otherwise
    assert run(wanbuild, ["inspect", str(tmp_path / "artifact")]) == 0
    assert facts in capsys.readouterr().out
    recipe = tmp_path / "recipe.toml"
    lines = [f'{name} = "{path}"' for name, path in text_files.items()]
    recipe.write_text("\n".join(['artifact = "other"', "[convert]", *lines]))
    with open_files(text_files) as source:
        assert source.pipeline_class == "WanPipeline" and source.boundary_ratio is None
    planned = ["plan", str(recipe), "--target", "h200", "--size", "96x64"]
    assert run(wanbuild, planned) == 0
    assert "recipe, 96x64x81" in capsys.readouterr().out


# --- 8-bit weights -----------------------------------------------------------------------------------------


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
    said = "of quantised weights become .* of bfloat16; --quantise source keeps the artifact small"
    assert len(lines) == 2 and all(re.search(said, line) for line in lines)
    assert contents(tmp_path / "one" / "weights") == contents(tmp_path / "other" / "weights")
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


def said(**layer: Any) -> np.ndarray:
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
        ("tensor", {**small, f"{prefix}{LAYER}.comfy_quant": said(**layer)}, None),
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
    assert contents(tmp_path / "a" / "weights") == contents(tmp_path / "b" / "weights")


@pytest.mark.slow
def test_a_lora_is_added_to_dequantised_weights(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    from wanbuild.lora.merge import LoraRequest

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
    assert contents(tmp_path / "a" / "weights") == contents(tmp_path / "b" / "weights")


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


# --- what does not fit -------------------------------------------------------------------------------------


def test_missing_parts_are_named(text_files: Mapping[str, Path]) -> None:
    with refuses("missing_parameter", found="--vae, no --tokenizer", remedy="tokenizer"):
        open_files({name: text_files[name] for name in ("transformer", "text_encoder")})


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in place of a part"])
@pytest.mark.parametrize(
    ("part", "other", "found", "option"),
    [
        ("text_encoder", "vae", "the VAE of Wan", "--vae"),
        ("vae", "text_encoder", "the text encoder", "--text-encoder"),
        ("transformer", "vae", "the VAE of Wan", "--vae"),
        ("transformer", "lora", "a LoRA", "--lora"),
    ],
)
def test_a_part_of_another_kind(
    part: str,
    other: str,
    found: str,
    option: str,
    alone: bool,
    text_files: Mapping[str, Path],
    text_checkpoint: Path,
    tmp_path: Path,
) -> None:
    """The line names the file and what it is, whatever SOURCE is."""
    save_file({"diffusion_model.blocks.0.self_attn.q.lora_down.weight": np.ones((2, 2))}, tmp_path / "lora")
    file = text_files.get(other, tmp_path / "lora")
    files = {**text_files, part: file} if alone else {part: file}
    request = ConvertRequest(None if alone else text_checkpoint, tmp_path / "a", files=files)
    named = {"what": f"{file} is {found}", "expected": f"the {part.replace('_', ' ')}", "remedy": option}
    with refuses("wrong_kind", SourceError, **named):
        convert(request)


def test_a_part_of_another_model(text_checkpoint: Path, tmp_path: Path) -> None:
    """Its config is SOURCE's, which it does not fit: the line names the file, not SOURCE."""
    write_with_published_heads(tmp_path / "checkpoint", "wan2.2-ti2v")
    save_file(original_vae(tmp_path / "checkpoint" / "vae"), file := tmp_path / "vae.safetensors")
    with refuses("mismatch", SourceError, what=f"{file} ({text_checkpoint}/vae/config.json): "):
        convert(ConvertRequest(text_checkpoint, tmp_path / "a", files={"vae": file}))


def test_parts_of_different_models(text_files: Mapping[str, Path], tmp_path: Path) -> None:
    write_with_published_heads(tmp_path / "checkpoint", "wan2.2-ti2v")
    save_file(original_vae(tmp_path / "checkpoint" / "vae"), tmp_path / "vae.safetensors")
    files = {**text_files, "vae": tmp_path / "vae.safetensors"}
    with refuses("unsupported", SourceError, what="wan2.2-ti2v: transformer out_channels") as caught:
        open_files(files)
    assert {"16,", "48"} <= set(caught.value.what.split())
    assert all(f"--{name} {files[name]}" in str(caught.value.found) for name in ("transformer", "vae"))


def test_the_settings_of_two_experts(text_files: Mapping[str, Path]) -> None:
    with open_files({**text_files, "transformer_2": text_files["transformer"]}) as source:
        assert source.boundary_ratio == 0.875
        assert source.scheduler_config["flow_shift"] == 12


def test_a_part_that_the_checkpoint_does_not_have(
    text_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["convert", str(text_checkpoint), "--artifact", str(tmp_path / "a"), "--image-encoder", "x"]
    assert run(wanbuild, [*command, "--json-errors"]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "unknown_name" and "--image-encoder" in error["message"]


def test_nothing_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(wanbuild, ["convert", "--artifact", str(tmp_path / "a"), "--json-errors"]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "missing_parameter" and "SOURCE" in error["expected"]
