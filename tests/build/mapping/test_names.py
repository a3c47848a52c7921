"""Names of tensors: every reader sees through the same prefixes, and the parts' original names are theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.hub_server import read_folder
from helpers.original_parts import original_text_key, original_vae_key
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.mapping.lora_keys import parse_key
from wanbuild.mapping.original_parts import NAMES, text_encoder_names, vae_names
from wanbuild.mapping.prefixes import TRANSFORMER, plain_names
from wanbuild.source.checkpoint import open_source
from wanbuild.source.recognise import recognised
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.errors import SourceError

KEYS = {
    "transformer": ("blocks.0.self_attn.q.weight", "head.modulation"),
    "vae": ("decoder.middle.0.residual.0.gamma", "conv1.weight"),
    "text_encoder": ("token_embedding.weight", "blocks.0.attn.q.weight"),
    "image_encoder": ("visual.transformer.0.attn.to_qkv.weight", "visual.pre_norm.weight"),
}
"""Two of each part's names in the original naming, the first one its own alone."""

PUBLISHED = (
    *TRANSFORMER,
    "generator.model.",  # Self-Forcing
    "base_model.model.model.",  # LongLive's LoRA
    "module.",
    "_orig_mod.",
    "model._fsdp_wrapped_module.",
)


@pytest.mark.parametrize("prefix", PUBLISHED)
@pytest.mark.parametrize("part", KEYS)
def test_every_part_is_read_under_every_prefix(part: str, prefix: str) -> None:
    plain = plain_names([prefix + key for key in KEYS[part]], "x")
    assert plain == {prefix + key: key for key in KEYS[part]}
    names, _ = NAMES[part]
    assert recognised([f"{prefix}{KEYS[part][0]}", "scaled_fp8"])[1] == part
    assert names(plain.values(), "x") == names(KEYS[part], "x")


@pytest.mark.parametrize("prefix", [*PUBLISHED, "lora_unet_", "lora_unet__", "lycoris_"])
def test_a_lora_is_read_under_every_prefix(prefix: str) -> None:
    name = "blocks.0.self_attn.q"
    spelled = name.replace(".", "_") if prefix.endswith("_") and "." not in prefix else name
    part = parse_key(f"{prefix}{spelled}.alpha")
    assert part is not None and (part.module, part.underscored) == (spelled, spelled != name)


def test_blocks_that_torch_wraps() -> None:
    wrapped = ["net._orig_mod.blocks.0._checkpoint_wrapped_module.norm3.bias", "net.head.head.bias"]
    assert list(plain_names(wrapped, "x").values()) == ["blocks.0.norm3.bias", "head.head.bias"]
    with refuses("conflict", SourceError, what="head.head.bias"):
        plain_names(["_orig_mod.head.head.bias", "head.head.bias"], "x")


def test_a_vae_of_a_folder_with_a_prefix(toy_checkpoint: Path, tmp_path: Path) -> None:
    with open_source(toy_checkpoint) as source:
        expected = source.component("vae").shapes
    shutil.copytree(toy_checkpoint, tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "vae").glob("*.safetensors")
    save_file({f"model.{key}": value for key, value in load_file(file).items()}, file)
    with open_source(tmp_path / "copy") as source:
        assert source.component("vae").shapes == expected


# --- the original names of a VAE and a text encoder ---


def rename(folder: Path, resnets: int) -> None:
    """Gives VAE and text encoder one file each, under original names and another file name."""
    parts = (
        ("vae", "diffusion_pytorch_model", "wan_vae", lambda key: original_vae_key(key, resnets)),
        ("text_encoder", "model", "umt5_xxl_bf16", original_text_key),
    )
    for component, plain, name, renamed in parts:
        weights: dict[str, np.ndarray] = {}
        for path in (folder / component).glob(f"{plain}*.safetensors"):
            weights |= load_file(path)
            path.unlink()
        for index in (folder / component).glob("*.index.json"):
            index.unlink()
        original = {renamed(key): weights[key] for key in weights if key != "encoder.embed_tokens.weight"}
        assert len(original) >= len(weights) - 1 and not original.keys() & weights.keys()
        if component == "text_encoder":
            original["spiece_model"] = np.zeros(5, np.uint8)  # as ComfyUI's file has
        save_file(original, folder / component / f"{name}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wan2.1-t2v", "wan2.2-ti2v"])
def test_the_artifact_is_the_same(variant: str, tmp_path: Path) -> None:
    for name in ("published", "original"):
        write_toy(tmp_path / name, variant)
    config = json.loads((tmp_path / "original" / "vae" / "config.json").read_text())
    flat = not config.get("is_residual", False)
    rename(tmp_path / "original", config["num_res_blocks"] + 1 if flat else 0)
    for name in ("published", "original"):
        convert(ConvertRequest(tmp_path / name, tmp_path / f"{name}-artifact"))
    expected, found = (
        read_folder(tmp_path / f"{name}-artifact" / "weights") for name in ("published", "original")
    )
    assert found.keys() == expected.keys() and len(expected) > 50
    assert found == expected


def test_names_of_the_diffusers_layout_stay() -> None:
    keys = ["decoder.mid_block.resnets.0.conv1.weight", "quant_conv.bias"]
    assert vae_names(keys, "x") == {key: key for key in keys}
    keys = ["shared.weight", "encoder.block.0.layer.0.layer_norm.weight"]
    assert text_encoder_names([*keys, "spiece_model"], "x") == {key: key for key in keys}


def test_a_key_that_is_no_part_is_refused() -> None:
    keys = ["decoder.middle.0.residual.0.gamma", "decoder.upsamples.3.resample.1.weight", "conv3.weight"]
    with refuses("wrong_kind", SourceError, what=": conv3.weight"):
        vae_names(keys, "x")
    with refuses("wrong_kind", SourceError, what=": blocks.0.attn.z.weight"):
        text_encoder_names(["token_embedding.weight", "blocks.0.attn.z.weight"], "x")
