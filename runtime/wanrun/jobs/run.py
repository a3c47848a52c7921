"""The options of a whole run: the loading, the paths of results, and the other files that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """The options of ``wanrun`` that are not options of a generation; ``wanrun --help`` describes each."""

    prompt: str | None
    prompts: Path | None
    latents: Path | None
    save_latents: Path | None
    output: Path | None
    overwrite: bool
    target: str | None
    allow_compile: bool
    retune: bool
    verify: str
    memory: str
    transfer: str
    text_encoder: str
    text_encoder_device: str | None
    no_embedding_cache: bool
    weights: str | None
    warmup: bool
    timing: bool
    timing_json: Path | None
    timing_trace: Path | None
    trace: Path | None
    distributed: bool
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    debug: bool
