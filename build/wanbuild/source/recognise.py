"""Recognises a single file that was given as a checkpoint, by its first bytes and its header.

Names of tensors: Wan-Video's own files (wan/modules) and the single files of ComfyUI, which repackage them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from wanbuild.mapping.lora_keys import of_adapter
from wanbuild.mapping.prefixes import common_prefix, unwrapped
from wanbuild.source.all_in_one import all_in_one
from wanbuild.source.checkpoint_parts import NEEDED, OPTIONS
from wanbuild.source.experts import NOISE, expert_named
from wanbuild.source.gguf_file import GgufFile
from wanbuild.source.safetensors import (
    GGUF,
    PICKLED_SUFFIXES,
    READABLE_DTYPES,
    TensorFile,
    first_bytes,
    pickled,
)
from wanbuild.source.scales import UNUSED
from wanbuild.source.shards import is_shard
from wanrun.errors import SourceError

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""The first bytes of files other than safetensors; torch's are a ZIP archive, or a pickle."""

_OF_LENGTH = bytes(4)
"""The bytes after the first four of a safetensors file, whose header has less than four gigabytes."""

LAYOUT = "give the checkpoint's folder or its hub id, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_PART = (
    "give it with the other parts: wanbuild convert --artifact DIR {option} {path} {others}, or with a "
    "checkpoint whose part it replaces: wanbuild convert CHECKPOINT --artifact DIR {option} {path}"
)
_WHOLE = f"use a published checkpoint: {LAYOUT}"

KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "blocks.0.self_attn.q.weight": ("a transformer in the original naming", "transformer"),
        "blocks.0.attn1.to_q.weight": ("a transformer in diffusers' naming", "transformer"),
        "decoder.middle.0.residual.0.gamma": ("the VAE of Wan 2.1 or 2.2 in the original naming", "vae"),
        "decoder.mid_block.resnets.0.conv1.weight": ("a VAE in diffusers' naming", "vae"),
        "decoder.3.conv.0.weight": ("a tiny VAE (TAEHV)", "tiny_vae"),
        "token_embedding.weight": ("the text encoder in the original naming", "text_encoder"),
        "enc.output_norm.weight": ("the text encoder in llama.cpp's naming", "text_encoder"),
        "encoder.block.0.layer.0.SelfAttention.q.weight": (
            "the text encoder in transformers' naming",
            "text_encoder",
        ),
        "visual.transformer.0.attn.to_qkv.weight": (
            "the image encoder in the original naming",
            "image_encoder",
        ),
        "vision_model.embeddings.class_embedding": (
            "the image encoder in transformers' naming",
            "image_encoder",
        ),
    }
)
"""The kind of a file of weights, and its component of a checkpoint, by a tensor that only this kind has."""


def no_checkpoint(path: Path) -> SourceError:
    """Returns the error of an existing file that was given as a checkpoint; it names the kind of file."""
    start = first_bytes(path)
    if start.startswith(GGUF) or path.suffix.lower() == ".gguf":
        return _of_gguf(path)
    is_pickle = start.startswith(PICKLE) and start[4:] != _OF_LENGTH
    if is_pickle or start.startswith(ZIP) or path.suffix in PICKLED_SUFFIXES:
        return pickled(path)
    if path.suffix != ".safetensors":
        return SourceError(
            "wrong_kind", f"{path} is not a folder", remedy="give the checkpoint's folder or its hub id"
        )
    try:
        with TensorFile(path) as file:
            dtypes = {key: entry.dtype_name for key, entry in file.entries.items()}
        if parts := all_in_one(path):
            return SourceError(
                "wrong_kind",
                f"{path} is an all-in-one file of {', '.join(parts)}",
                expected="a checkpoint in the diffusers layout",
                remedy=f"convert it: wanbuild convert {path} --artifact DIR",
            )
    except SourceError as error:
        return error
    return _of_weights(path, dtypes)


def _of_gguf(path: Path) -> SourceError:
    """Returns the error of a GGUF file, which is one part."""
    try:
        with GgufFile(path) as file:
            return _of_weights(path, {key: entry.dtype_name for key, entry in file.entries.items()})
    except SourceError as error:
        return error


def _of_weights(path: Path, dtypes: Mapping[str, str]) -> SourceError:
    """Returns the error of a single safetensors file, by the dtypes of its tensors by name."""
    kind, component = recognised(dtypes)
    weights = {key: found for key, found in dtypes.items() if key.endswith(".weight")}
    quantized = next((found for found in weights.values() if found not in READABLE_DTYPES), None)
    if quantized is not None:
        return SourceError(
            "wrong_kind",
            f"{path} is {kind}, quantized",
            expected="float32, float16 or bfloat16 weights, or 8-bit ones with scales",
            found=quantized,
            remedy=f"use the published weights: {LAYOUT}",
        )
    expert = expert_named(path)
    if kind == "a LoRA":
        option = f"--lora-{NOISE[expert]}" if expert else "--lora"
        remedy = f"merge it into a checkpoint: wanbuild convert CHECKPOINT --artifact DIR {option} {path}"
        return SourceError("wrong_kind", f"{path} is a LoRA, not a checkpoint", remedy=remedy)
    needed: tuple[str, ...] = NEEDED
    if expert and component == "transformer":
        component, needed = expert, (*NOISE, *NEEDED[1:])
    others = " ".join(f"{OPTIONS[name]} ..." for name in needed if name != component)
    place = path.parent if is_shard(path) else path
    remedy = _PART.format(option=OPTIONS[component], path=place, others=others) if component else _WHOLE
    return SourceError(
        "wrong_kind",
        f"{path} is {kind}, one part of a checkpoint",
        expected="all of its parts",
        remedy=remedy,
    )


def check_kind(name: str, keys: Iterable[str], where: Path) -> None:
    """Raises SourceError if a part's file, with tensors ``keys``, is another part's or a LoRA.

    The error says what the file is, and which option takes it.
    """
    kind, found = recognised(keys)
    expected = "transformer" if name in NOISE else name
    if kind == "a LoRA":
        remedy = f"merge it into a transformer: --lora {where}"
    elif found and found != expected:
        remedy = f"give it as {OPTIONS[found]}"
    else:
        return
    raise SourceError(
        "wrong_kind",
        f"{where} is {kind}",
        expected=f"the {expected.replace('_', ' ')}, as {OPTIONS[name]} or in a checkpoint's {name}",
        remedy=remedy,
    )


def recognised(keys: Iterable[str]) -> tuple[str, str]:
    """Returns the kind of a file with these tensors, and its component of a checkpoint; empty if unknown.

    Names of tensors may have a prefix of single files.
    """
    names = [unwrapped(key) for key in keys if not key.endswith(UNUSED)]
    if names and all(map(of_adapter, names)):
        return "a LoRA", ""
    prefix = common_prefix(names)
    known = (KINDS.get(name.removeprefix(prefix)) for name in names)
    return next(filter(None, known), ("a file of weights that is not known", ""))
