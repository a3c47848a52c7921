"""GGUF files: the values that the package gguf gives, in any range of bytes; one line for what is wrong."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from helpers.checkpoint_files import State, save_file
from helpers.naive_conversion import arrays_of
from helpers.refusals import check_refusal, refuses
from helpers.single_files import original_transformer, state_of
from wanbuild.build import convert
from wanbuild.conversion.chosen import Quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.source.component import open_part
from wanbuild.source.gguf_file import GgufFile, values_of, weight_file
from wanbuild.source.recognise import no_checkpoint
from wanbuild.source.safetensors import TensorFile
from wanbuild.source.single_files import open_files
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.errors import SourceError
from wanrun.units import in_bytes

MADE = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
"""Types that the package gguf quantises."""

READ = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)
"""Types that it dequantises only: any bytes will do."""


def write(path: Path, state: State, kinds: Mapping[str, Kind], **facts: Any) -> State:
    """Writes a file with gguf's own writer, and returns what the tensors stand for."""
    writer, large = gguf.GGUFWriter(path, "wan"), dict[str, np.ndarray]()
    for name, fact in facts.items():
        writer.add_array(name.replace("__", "."), fact)
    for key, value in state.items():
        kind = kinds.get(key, Kind.F32)
        if kind in MADE or kind == Kind.BF16:
            stored = quantize(value.astype(np.float32), kind)
            large[key] = dequantize(stored, kind).reshape(value.shape).astype(np.float32)
            writer.add_tensor(key, stored, raw_dtype=kind)
        elif kind in READ:
            writer.add_tensor(key, value, raw_dtype=kind)
            large[key] = dequantize(value, kind).astype(np.float32)
        else:
            large[key] = value
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return large


@pytest.mark.parametrize("kind", [*MADE, *READ], ids=lambda kind: kind.name)
def test_any_range_of_a_quantised_tensor(kind: Kind, tmp_path: Path) -> None:
    rng, (items, nbytes) = np.random.default_rng(kind), gguf.GGML_QUANT_SIZES[kind]
    if kind in MADE:
        value = rng.standard_normal((3, 4 * items)).astype(np.float32)
    else:
        value = rng.integers(0, 48, (3, 4 * nbytes), np.uint8)  # a scale of float16 that is finite
    path = tmp_path / "x.gguf"
    large = write(path, {"a": np.ones(7, np.float32), "b": value}, {"b": kind})
    with weight_file(path) as file:
        assert isinstance(file, GgufFile) and file.entries["b"].shape == (3, 4 * items)
        np.testing.assert_array_equal(file.array("a"), large["a"])
        np.testing.assert_array_equal(file.array("b"), large["b"])
        flat = large["b"].reshape(-1)
        for _ in range(20):
            first, last = sorted(rng.integers(0, len(flat) + 1, 2))
            part = np.empty(4 * (last - first), np.uint8)
            file.read("b", 4 * int(first), part)
            np.testing.assert_array_equal(part.view(np.float32), flat[first:last])
        for begin, length in ((2, 4), (0, 3), (4 * len(flat), 4), (-4, 4)):
            with pytest.raises(ValueError, match="bytes"):
                file.read("b", begin, np.empty(length, np.uint8))


def test_plain_types_are_read_as_they_are(tmp_path: Path) -> None:
    state = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
    large = write(tmp_path / "x.gguf", {**state, "c": state["a"]}, {"c": Kind.BF16})
    with GgufFile(tmp_path / "x.gguf") as file:
        assert [file.entries[key].dtype_name for key in "abc"] == ["F32", "F16", "BF16"]
        for key in "abc":
            np.testing.assert_array_equal(file.array(key).astype(np.float32), large[key].astype(np.float32))


@pytest.mark.slow
def test_the_artifact_is_that_of_the_dequantised_weights(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    """A transformer of Wan as ComfyUI-GGUF has it: matrices quantised, the rest in float32."""
    state = original_transformer(text_checkpoint / "transformer")
    kinds = {
        key: random.Random(key).choice(MADE)
        for key, value in state.items()
        if value.ndim == 2 and key.endswith(".weight") and value.shape[1] % 32 == 0
    }
    assert len(kinds) > 10
    five = state["patch_embedding.weight"]
    flat = {**state, "patch_embedding.weight": five.reshape(five.shape[0], -1)}
    shape = {"comfy__gguf__orig_shape__patch_embedding__weight": list(five.shape)}
    large = write(tmp_path / "wan.gguf", flat, kinds, **shape)
    large["patch_embedding.weight"] = five
    save_file(large, tmp_path / "wan.safetensors")
    lines: list[str] = []
    found = [
        convert(
            ConvertRequest(None, tmp_path / name, files={**text_files, "transformer": tmp_path / file}),
            lambda *said: lines.extend(said),
        )
        for name, file in (("one", "wan.gguf"), ("two", "wan.safetensors"))
    ]
    (line,) = lines
    nbytes = in_bytes(found[0].components["transformer"].nbytes)
    assert line.startswith("transformer: ") and "--quantise int8" in line
    assert f" {nbytes} of bfloat16" in line
    folder = tmp_path / "checkpoint"
    shutil.copytree(text_checkpoint, folder, ignore=shutil.ignore_patterns("diffusion_pytorch_model*"))
    shutil.copy(tmp_path / "wan.gguf", folder / "transformer")
    shutil.copytree(text_checkpoint / "vae", folder / "vae", dirs_exist_ok=True)
    found.append(convert(ConvertRequest(folder, tmp_path / "three")))
    assert found[2].components == found[1].components
    assert found[0].components == found[1].components
    assert found[0].source["files"] != found[1].source["files"]
    file = tmp_path / "wan.gguf"
    check_refusal(no_checkpoint(file), "wrong_kind", what="transformer", remedy=f"--transformer {file}")


def all_in_q8_0(checkpoint: Path, path: Path) -> State:
    """Writes a transformer whose matrices are of Q8_0, and returns what they stand for."""
    state = original_transformer(checkpoint / "transformer")
    even = [key for key, value in state.items() if value.ndim == 2 and value.shape[1] % 32 == 0]
    return write(path, state, dict.fromkeys(even, Kind.Q8_0))


@pytest.mark.slow
def test_blocks_of_q8_0_are_kept(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    """By --quantise source; rotated rows move with their scales."""
    large = all_in_q8_0(text_checkpoint, tmp_path / "wan-Q8_0.gguf")
    save_file(large, tmp_path / "wan.safetensors")
    files = {**text_files, "transformer": tmp_path / "wan-Q8_0.gguf"}
    lines: list[str] = []
    cast = convert(ConvertRequest(None, tmp_path / "cast", files=files), lambda *said: lines.extend(said))
    assert len(lines) == 1 and "--quantise source" in lines[0]
    lines.clear()
    wanted = ConvertRequest(None, tmp_path / "kept", files=files, quantise=Quantise("source"))
    kept = convert(wanted, lambda *said: lines.extend(said))
    assert len(lines) == 1 and " 0.00 %" in lines[0]
    assert kept.source == cast.source
    layers = kept.dtypes["transformer"].eight_bit
    assert set(layers.values()) == {"q8_0"} and layers.keys() >= {"blocks/ffn/up", "blocks/attn1/to_q"}
    files["transformer"] = tmp_path / "wan.safetensors"
    convert(ConvertRequest(None, tmp_path / "plain", files=files, dtypes={"transformer": "float32"}))
    stored, plain = (arrays_of(tmp_path / folder, "transformer") for folder in ("kept", "plain"))
    for layer in layers:
        weight, scale = stored.pop(f"{layer}/weight"), stored.pop(f"{layer}/scale")
        assert (weight.dtype, scale.dtype) == (np.int8, np.float16)
        blocks = weight.reshape(*scale.shape, 32) * scale[..., None].astype(np.float32)
        np.testing.assert_array_equal(blocks.reshape(weight.shape), plain.pop(f"{layer}/weight"))
    assert stored.keys() == plain.keys()


def test_blocks_of_the_parts_of_a_tensor(tmp_path: Path) -> None:
    """Animate's keys and values are one tensor in the original."""
    channels = {str(4 << power): 4 for power in range(8)}
    sizes = {"motion_encoder_size": 512, "motion_encoder_channel_sizes": channels}
    sizes |= {"attention_head_dim": 32, "added_kv_proj_dim": 64}
    write_toy(tmp_path / "animate", "wan2.2-animate", configs={"transformer": sizes})
    all_in_q8_0(tmp_path / "animate", tmp_path / "x.gguf")
    config = tmp_path / "animate" / "transformer" / "config.json"
    with ExitStack() as stack:
        source = open_part("transformer", None, tmp_path / "x.gguf", config, stack)
        found = {key: one for key, one in source.tensors.items() if one.blocks is not None}
        parts = [key for key, one in found.items() if one.begin]
        assert len(found) > 20 and parts
        for key, one in found.items():
            assert one.blocks is not None
            blocks = np.empty(one.blocks.shape, one.blocks.dtype)
            source.read_blocks(key, 0, blocks.reshape(-1).view(np.uint8))
            np.testing.assert_array_equal(values_of(blocks.reshape(-1)), source.array(key).reshape(-1, 32))


def test_a_text_encoder_has_the_names_of_llama_cpp(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    """By the table of the package gguf: each weight in its place, and another one refused by name."""
    state = state_of(text_checkpoint / "text_encoder")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 9)
    names = {key: table.get_name(key, (".weight",)) for key in state if "embed_tokens" not in key}
    assert None not in names.values() and len(names) == len(set(names.values()))
    path, given = tmp_path / "t5.gguf", {name: state[key] for key, name in names.items()}
    even = [name for name, value in given.items() if value.ndim == 2 and value.shape[1] % 32 == 0]
    kinds = dict.fromkeys(even, Kind.Q8_0)
    assert len(kinds) > 10
    large = write(path, given, kinds)
    with ExitStack() as stack:
        source = open_part("text_encoder", None, path, None, stack)
        assert source.class_name == "UMT5EncoderModel" and source.tensors.keys() == names.keys()
        for key, name in names.items():
            np.testing.assert_array_equal(source.array(key), large[name], err_msg=key)
    open_files({**text_files, "text_encoder": path}).close()
    check_refusal(no_checkpoint(path), "wrong_kind", what="llama.cpp", remedy=f"--text-encoder {path}")
    other = {"enc.blk.0.attn_k_norm.weight": np.ones(4, np.float32), "norm.weight": np.ones(4, np.float32)}
    write(path, {**given, **other}, {})
    unknown = ": enc.blk.0.attn_k_norm.weight, norm.weight"
    with ExitStack() as stack, refuses("wrong_kind", SourceError, what=unknown):
        open_part("text_encoder", None, path, None, stack)


@pytest.mark.slow
def test_values_and_shapes_that_are_none(
    text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    state, path = original_transformer(text_checkpoint / "transformer"), tmp_path / "x.gguf"
    shape = {"comfy__gguf__orig_shape__patch_embedding__weight": [1, 2]}
    write(path, state, {}, **shape)
    with refuses("unreadable", SourceError, what="orig_shape.patch_embedding.weight"):
        GgufFile(path)
    all_in_q8_0(text_checkpoint, path)
    key = "blocks.1.ffn.0.weight"
    with GgufFile(path) as file:
        offset = file.entries[key].offset
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, offset, 0x7E00)  # a scale that is not a number
    path.write_bytes(data)
    files = {**text_files, "transformer": path}
    for quantise in (None, Quantise("source")):  # as another dtype, and as it is
        with open_files(files), refuses("not_finite", SourceError, what="transformer: "):
            convert(ConvertRequest(None, tmp_path / "artifact", files=files, quantise=quantise))
    assert not (tmp_path / "artifact").exists()


def test_which_files_are_gguf(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "a.gguf")  # whatever its name
    with refuses("missing_file", SourceError, what=tmp_path / "none"):
        weight_file(tmp_path / "none")
    with refuses("wrong_kind", SourceError, what=tmp_path):
        weight_file(tmp_path)
    with weight_file(tmp_path / "a.gguf") as file:
        assert type(file) is TensorFile
