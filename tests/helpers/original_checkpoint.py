"""The original Wan-Video form of a transformer: its keys, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def linear(name: str) -> list[str]:
    """The keys of a module with a weight and a bias."""
    return [f"{name}.weight", f"{name}.bias"]


def _block(prefix: str, image: bool) -> list[str]:
    keys = [f"{prefix}.modulation", *linear(f"{prefix}.norm3")]
    for attention in ("self_attn", "cross_attn"):
        for projection in "qkvo":
            keys += linear(f"{prefix}.{attention}.{projection}")
        keys += [f"{prefix}.{attention}.norm_q.weight", f"{prefix}.{attention}.norm_k.weight"]
    if image:
        keys += [*linear(f"{prefix}.cross_attn.k_img"), *linear(f"{prefix}.cross_attn.v_img")]
        keys.append(f"{prefix}.cross_attn.norm_k_img.weight")
    return keys + linear(f"{prefix}.ffn.0") + linear(f"{prefix}.ffn.2")


def original_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of the transformer with this diffusers config, written down from WanModel and VaceWanModel.

    Source: the module tree of wan/modules/model.py and vace_model.py in Wan-Video/Wan2.1.
    """
    image = config["image_dim"] is not None
    keys = ["head.modulation"]
    for name in (
        *("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2"),
        *("time_projection.1", "head.head"),
    ):
        keys += linear(name)
    for layer in range(config["num_layers"]):
        keys += _block(f"blocks.{layer}", image)
    if image:
        keys += [key for i in (0, 1, 3, 4) for key in linear(f"img_emb.proj.{i}")]
    if config.get("pos_embed_seq_len"):
        keys.append("img_emb.emb_pos")
    if "vace_layers" in config:
        keys += linear("vace_patch_embedding") + linear("vace_blocks.0.before_proj")
        for layer in range(len(config["vace_layers"])):
            keys += _block(f"vace_blocks.{layer}", False) + linear(f"vace_blocks.{layer}.after_proj")
    return keys


CONVS = "motion_encoder.enc.net_app.convs"


def animate_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys that Animate has besides, but for the tensors of keys and values (``fused_keys``).

    Source: the module tree of WanAnimateModel, with the motion encoder for faces of 512 pixels.
    """
    keys = [
        *linear("pose_patch_embedding"),
        *("motion_encoder.dec.direction.weight", f"{CONVS}.0.0.weight", f"{CONVS}.0.1.bias"),
        f"{CONVS}.8.weight",
        *(key for i in range(5) for key in linear(f"motion_encoder.enc.fc.{i}")),
        *("face_encoder.padding_tokens", *linear("face_encoder.out_proj")),
        *(key for name in ("conv1_local", "conv2", "conv3") for key in linear(f"face_encoder.{name}.conv")),
    ]
    for i in range(1, 8):
        keys += [f"{CONVS}.{i}.{name}" for name in ("conv1.0.weight", "conv1.1.bias", "conv2.1.weight")]
        keys += [f"{CONVS}.{i}.{name}" for name in ("conv2.2.bias", "skip.1.weight")]
    for i in range(_adapters(config)):
        block = f"face_adapter.fuser_blocks.{i}"
        keys += [*linear(f"{block}.linear1_q"), *linear(f"{block}.linear2")]
        keys += [f"{block}.q_norm.weight", f"{block}.k_norm.weight"]
    return keys


def fused_keys(config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Keys of Animate's tensors of keys and values, with those of diffusers' two tensors each."""
    return {
        f"face_adapter.fuser_blocks.{i}.linear1_kv.{kind}": (
            f"face_adapter.{i}.to_k.{kind}",
            f"face_adapter.{i}.to_v.{kind}",
        )
        for i in range(_adapters(config))
        for kind in ("weight", "bias")
    }


def _adapters(config: Mapping[str, Any]) -> int:
    return -(-config["num_layers"] // config["inject_face_latents_blocks"])


def original_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that the original repository has for a transformer with this diffusers config."""
    vace = "vace_layers" in config
    return {
        "_class_name": "VaceWanModel" if vace else "WanModel",
        "_diffusers_version": "0.30.0",
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": config["in_channels"],
        "model_type": "vace" if vace else "t2v",
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "out_dim": config["out_channels"],
        "text_len": 512,
        **({"text_dim": config["text_dim"]} if config["text_dim"] != 4096 else {}),
        **({"vace_layers": config["vace_layers"], "vace_in_dim": 96} if vace else {}),
    }
