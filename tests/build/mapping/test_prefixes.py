"""Prefixes of tensors' names: every reader sees through the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from wanbuild.mapping.lora_keys import parse_key
from wanbuild.mapping.original_parts import NAMES
from wanbuild.mapping.prefixes import TRANSFORMER, plain_names
from wanbuild.source.checkpoint import open_source
from wanbuild.source.recognise import recognised
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
    part = parse_key(
        f"{prefix}{name.replace('.', '_') if '_unet' in prefix or 'lyc' in prefix else name}.alpha"
    )
    assert part is not None and part.module == (name.replace(".", "_") if part.underscored else name)


def test_blocks_that_torch_wraps() -> None:
    wrapped = ["net._orig_mod.blocks.0._checkpoint_wrapped_module.norm3.bias", "net.head.head.bias"]
    assert list(plain_names(wrapped, "x").values()) == ["blocks.0.norm3.bias", "head.head.bias"]
    with pytest.raises(SourceError, match="twice"):
        plain_names(["_orig_mod.head.head.bias", "head.head.bias"], "x")


def test_a_vae_of_a_folder_with_a_prefix(toy_checkpoint: Path, tmp_path: Path) -> None:
    with open_source(toy_checkpoint) as source:
        expected = source.component("vae").shapes
    for path in toy_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "vae").unlink()
    (tmp_path / "vae").mkdir()
    (file,) = (toy_checkpoint / "vae").glob("*.safetensors")
    save_file(
        {f"model.{key}": value for key, value in load_file(file).items()},
        tmp_path / "vae" / file.name,
    )
    (tmp_path / "vae" / "config.json").symlink_to(toy_checkpoint / "vae" / "config.json")
    with open_source(tmp_path) as source:
        assert source.component("vae").shapes == expected
