"""Options of other tools that are no options of a generation here: what each means, or what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CONVERT = "convert it first: wanbuild convert CHECKPOINT --artifact DIR"
_PARTS = "an artifact has it; another one is made of single files: wanbuild convert --help"
_FRAMES = "pass --frames: seconds times frames per second, as built"
_MESH = "a mesh belongs to a program: wanbuild compile --mesh, see docs/meshes.md"

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "pass --num-videos, as built, or --prompts FILE",
        "checkpoint": _CONVERT,
        "ckpt": _CONVERT,
        "ckpt_dir": _CONVERT,
        "clip": _PARTS,
        "compile": "run wanbuild compile",
        "device": "pass --target, one of those that wanrun --list prints",
        "dit_fsdp": _MESH,
        "dtype": "it belongs to a program: wanbuild compile --dtype",
        "duration": _FRAMES,
        "fp8": "weights are as converted, in bfloat16",
        "height": "pass --size WIDTHxHEIGHT",
        "lora": "it is merged into the weights: wanbuild convert --lora FILE",
        "model": _CONVERT,
        "num_gpus": _MESH,
        "offload_model": "pass --memory low",
        "ring_size": _MESH,
        "seconds": _FRAMES,
        "strength": "a video is not made from another one by noising",
        "t5_cpu": "pass --text-encoder-device cpu",
        "t5_fsdp": _MESH,
        "teacache": "pass fewer --steps: no step is skipped",
        "text_encoder": _PARTS,
        "task": "an artifact is one model; wanbuild inspect DIR says which",
        "ulysses_size": _MESH,
        "unet": _PARTS,
        "use_prompt_extend": "write the longer prompt, or give several with --prompts FILE",
        "width": "pass --size WIDTHxHEIGHT",
    }
)
"""By a name of other tools that no option has, what to do instead."""


BUILD_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("checkpoint", "ckpt", "ckpt_dir", "model"), "name it without an option"),
        "clip": "pass --text-encoder FILE, or --image-encoder FILE",
        "dtype": "wanbuild compile has it",
        "fp8": "8-bit weights are read as they are, and stored as --weights-dtype says",
        "unet": "pass --transformer FILE",
    }
)
"""The same for ``wanbuild``, where it is another thing."""


def elsewhere(command: str, option: str) -> str | None:
    """Returns what to do instead of a command's option that only other tools have; None for unknown ones."""
    rows = {**ELSEWHERE, **BUILD_ELSEWHERE} if command.startswith("wanbuild") else ELSEWHERE
    remedy = rows.get(option.lstrip("-").replace("-", "_"))
    return None if remedy is None else f"{command} has no {option}; {remedy}"
