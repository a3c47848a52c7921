"""A checkpoint in the diffusers layout as single files in the original naming, one for each component."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from helpers.checkpoint_files import State, load_file, save_file
from helpers.original_checkpoint import animate_keys, fused_keys, original_keys
from helpers.original_parts import original_image_state, original_text_key, original_vae_key
from wanbuild.mapping.original import diffusers_names
from wanbuild.toy.toy_checkpoint import write_toy

PUBLISHED_HEADS = {
    "transformer": {"num_attention_heads": 2, "attention_head_dim": 128},
    "image_encoder": {"hidden_size": 80, "num_attention_heads": 1},
}
"""Heads of the published sizes, which shapes do not show."""


def write_with_published_heads(folder: Path, variant: str) -> None:
    """Writes a toy whose configs follow from its shapes."""
    image = variant in ("wan2.1-i2v", "wan2.1-flf2v", "wan2.2-animate")
    wider = {"image_dim": 80, "added_kv_proj_dim": 256} if image else {}
    wider |= {"rope_dim": [44, 42, 42]} if variant.startswith("helios") else {}
    even = {"num_layers": 4} if variant.endswith("-vace") else {}  # control blocks are evenly spread
    configs = {"transformer": {**PUBLISHED_HEADS["transformer"], **wider, **even}}
    write_toy(
        folder,
        variant,
        configs={**configs, "image_encoder": PUBLISHED_HEADS["image_encoder"]} if image else configs,
    )


def state_of(component: Path) -> State:
    """All tensors of a component's folder."""
    state: State = {}
    for file in component.glob("*.safetensors"):
        state |= load_file(file)
    return state


def original_transformer(component: Path, prefix: str = "") -> State:
    """A transformer's tensors under the original names."""
    config, state = json.loads((component / "config.json").read_text()), state_of(component)
    if {"gate_value", "rope_dim"} & config.keys():  # AnyFlow's and Helios' are diffusers' own
        return {prefix + name: tensor for name, tensor in state.items()}
    animate = "motion_dim" in config
    keys = original_keys(config) + (animate_keys(config) if animate else [])
    original = {prefix + key: state.pop(name) for key, name in diffusers_names(keys).items()}
    for key, parts in (fused_keys(config) if animate else {}).items():
        original[prefix + key] = np.concatenate([state.pop(part) for part in parts])
    assert not state, sorted(state)
    return original


def original_vae(component: Path) -> State:
    """A VAE's tensors under the original names."""
    config = json.loads((component / "config.json").read_text())
    resnets = 0 if config.get("is_residual", False) else config["num_res_blocks"] + 1
    return {original_vae_key(key, resnets): value for key, value in state_of(component).items()}


def original_text_encoder(component: Path) -> State:
    """A text encoder's tensors under the original names, with the table that ComfyUI's files hold."""
    state = state_of(component)
    state.pop("encoder.embed_tokens.weight", None)
    return {
        **{original_text_key(key): value for key, value in state.items()},
        "spiece_model": np.zeros(5, np.uint8),
    }


def write_single_files(checkpoint: Path, folder: Path, prefix: str = "") -> dict[str, Path]:
    """Writes every component as one file in the original naming.

    Args:
        checkpoint: in the diffusers layout.
        folder: for the files; the tokenizer stays in the checkpoint.
        prefix: of the transformer's keys.

    Returns:
        The file of each component, and the tokenizer's folder.
    """
    folder.mkdir()
    files = {"tokenizer": checkpoint / "tokenizer"}
    for component in sorted(path for path in checkpoint.iterdir() if any(path.glob("*.safetensors"))):
        if component.name.startswith("transformer"):
            state = original_transformer(component, prefix)
        elif component.name == "vae":
            state = original_vae(component)
        elif component.name == "text_encoder":
            state = original_text_encoder(component)
        else:
            state = original_image_state(state_of(component))
        files[component.name] = folder / f"wan_{component.name}_fp32.safetensors"
        save_file(state, files[component.name])
    return files


ALL_IN_ONE = {
    "transformer": "model.diffusion_model.",
    "vae": "vae.",
    "text_encoder": "text_encoders.umt5xxl.transformer.",
}
"""The prefixes of ComfyUI's all-in-one checkpoints."""


def write_all_in_one(
    files: Mapping[str, Path], path: Path, prefixes: Mapping[str, str] = ALL_IN_ONE
) -> State:
    """Writes the parts with these prefixes as one file, with what ComfyUI stores besides."""
    state: State = {"text_encoders.umt5xxl.logit_scale": np.ones((), np.float32)}
    for name, prefix in prefixes.items():
        state |= {prefix + key: value for key, value in load_file(files[name]).items()}
    save_file(state, path)
    return state
