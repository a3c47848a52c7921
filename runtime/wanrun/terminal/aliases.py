"""Options of other tools that are no options of a generation here: what each means, or what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OUTPUT = ("out", "output_path", "save_file")
"""Names of other tools that mean ``--output``; those of other options are in their rows."""

_MESH = "a mesh belongs to a program: wanbuild compile --mesh, see docs/meshes.md"

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "pass --num-videos, as built, or --prompts FILE",
        "checkpoint": "convert it first: wanbuild convert CHECKPOINT --artifact DIR",
        "ckpt_dir": "convert it first: wanbuild convert CHECKPOINT --artifact DIR",
        "compile": "run wanbuild compile",
        "device": "pass --target, one of those that wanrun --list prints",
        "dit_fsdp": _MESH,
        "dtype": "it belongs to a program: wanbuild compile --dtype",
        "height": "pass --size WIDTHxHEIGHT",
        "lora": "it is merged into the weights: wanbuild convert --lora FILE",
        "model": "convert it first: wanbuild convert MODEL --artifact DIR",
        "num_gpus": _MESH,
        "offload_model": "pass --memory low",
        "ring_size": _MESH,
        "t5_cpu": "pass --text-encoder-device cpu",
        "t5_fsdp": _MESH,
        "task": "an artifact is one model; wanbuild inspect DIR says which",
        "ulysses_size": _MESH,
        "use_prompt_extend": "write the longer prompt, or give several with --prompts FILE",
        "width": "pass --size WIDTHxHEIGHT",
    }
)
"""By a name of other tools that no option has, what to do instead."""


def elsewhere(command: str, option: str) -> str | None:
    """Returns what to do instead of a command's option that only other tools have; None for unknown ones."""
    remedy = ELSEWHERE.get(option.lstrip("-").replace("-", "_"))
    return None if remedy is None else f"{command} has no {option}; {remedy}"
