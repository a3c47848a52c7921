"""VAE and text encoder under Wan-Video's own names: the same artifact as from the diffusers layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.original_parts import original_text_key, original_vae_key
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.mapping.original_parts import text_encoder_names, vae_names
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.errors import SourceError


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    expected, found = (files(tmp_path / f"{name}-artifact" / "weights") for name in ("published", "original"))
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
