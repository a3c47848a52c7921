"""A single file that is given as a checkpoint: one line says what it is, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.refusals import check_refusal, refuses
from wanbuild.source.checkpoint import open_source
from wanbuild.source.recognise import no_checkpoint, recognised
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError

NAMES: Mapping[str, Sequence[str]] = {
    "a LoRA": ["diffusion_model.blocks.0.self_attn.q.lora_A.weight", "diffusion_model.blocks.0.ffn.0.diff_b"],
    "a transformer in the original naming": ["blocks.0.self_attn.q.weight", "patch_embedding.weight"],
    "a transformer in diffusers' naming": ["blocks.0.attn1.to_q.weight"],
    "the VAE of Wan 2.1 or 2.2 in the original naming": ["decoder.middle.0.residual.0.gamma", "conv1.weight"],
    "a VAE in diffusers' naming": ["decoder.mid_block.resnets.0.conv1.weight"],
    "the text encoder in the original naming": ["token_embedding.weight", "blocks.0.attn.q.weight"],
    "the text encoder in transformers' naming": ["encoder.block.0.layer.0.SelfAttention.q.weight"],
    "the image encoder in the original naming": ["visual.transformer.0.attn.to_qkv.weight"],
    "the image encoder in transformers' naming": ["vision_model.embeddings.class_embedding"],
    "a file of weights that is not known": ["x.weight"],
}


def written(path: Path, names: Sequence[str], dtype: object = np.float32) -> Path:
    save_file({name: np.zeros(2, dtype) for name in names}, path)
    return path


@pytest.mark.parametrize("kind", NAMES)
def test_what_a_file_of_weights_is(kind: str, tmp_path: Path) -> None:
    assert recognised(NAMES[kind])[0] == kind
    file = tmp_path / "x.safetensors"
    error = no_checkpoint(written(file, NAMES[kind]))
    check_refusal(error, "wrong_kind", what=f"{file} is {kind}, ", remedy="")
    remedy = error.remedy or ""
    assert ("--lora" in remedy) == (kind == "a LoRA")
    parts = {"transformer": "transformer", "VAE": "vae"}
    parts |= {f"{name} encoder": f"{name}-encoder" for name in ("text", "image")}
    option = next((option for name, option in parts.items() if f"{name} " in kind), None)
    assert ("--tokenizer ..." in remedy) == (option is not None)
    if option is not None:
        assert f"--{option} {file}" in remedy
        assert all(f"--{name} ..." in remedy for name in {"transformer", "vae", "tokenizer"} - {option})
    assert "wanbuild convert" in remedy or "-Diffusers" in remedy


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("blocks.0.self_attn.q.lora_A", True),
        ("blocks.0.self_attn.q.lora_A.bias", True),
        ("blocks.0.self_attn.q.lora_down.default.weight", True),
        ("blocks.0.self_attn.q.diff.weight", True),
        ("lora_unet_blocks_0_ffn_0.alpha", True),
        ("text_encoder.encoder.block.0.layer.0.SelfAttention.q.weight", False),
        ("te.encoder.final_layer_norm.weight", False),
    ],
)
def test_what_an_adapter_s_tensor_is(name: str, adapter: bool) -> None:
    assert (recognised([name])[0] == "a LoRA") == adapter


def test_quantized_weights(tmp_path: Path) -> None:
    names = ["blocks.0.self_attn.q.weight", "blocks.0.self_attn.q.scale_weight"]
    eight = written(tmp_path / "x.safetensors", names, ml_dtypes.float8_e4m3fn)
    check_refusal(no_checkpoint(eight), "wrong_kind", what="transformer", remedy=f"--transformer {eight}")
    whole = written(tmp_path / "y.safetensors", names[:1], np.uint8)
    check_refusal(no_checkpoint(whole), "wrong_kind", what="transformer", found="U8", remedy="-Diffusers")


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("wan.gguf", b"", "damaged"),
        ("wan.gguf", b"GGUF\x03\x00\x00\x00", "unreadable"),
        ("wan.bin", b"GGUF\x03\x00\x00\x00", "untrusted"),
        ("wan.pth", b"PK\x03\x04....", "untrusted"),
        ("wan", b"\x80\x02}q", "untrusted"),
        ("wan.ckpt", b"x", "untrusted"),
        ("wan.json", b"{}", "wrong_kind"),
        ("wan.safetensors", b"abc", "damaged"),
        ("wan.safetensors", b"\x80\x00\x00\x00\x00\x00\x00\x00{", "damaged"),  # begins as a pickle does
    ],
)
def test_other_files(name: str, content: bytes, code: ErrorCode, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    check_refusal(no_checkpoint(tmp_path / name), code, what=tmp_path / name)


def test_a_folder_in_wan_s_own_layout(tmp_path: Path) -> None:
    for name in ("models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "diffusion_pytorch_model.safetensors"):
        (tmp_path / name).touch()
    tokenizer = f"--tokenizer {tmp_path}/google/umt5"
    with refuses("untrusted", SourceError, what=tmp_path, remedy=tokenizer) as caught:
        open_source(tmp_path)
    assert "-Diffusers" in str(caught.value.remedy)
    (tmp_path / "Wan2.1-T2V").mkdir()
    absent = tmp_path / "Wan2.1_T2V"
    with refuses("missing_file", SourceError, what=absent, found=tmp_path / "Wan2.1-T2V"):
        open_source(absent)
