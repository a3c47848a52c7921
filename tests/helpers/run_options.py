"""What a run is told where its command line gives nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from wanrun.jobs.run import RunOptions

_DEFAULTS = RunOptions(
    prompt=None,
    prompts=None,
    latents=None,
    save_latents=None,
    output=Path("out.mp4"),
    overwrite=False,
    target=None,
    allow_compile=False,
    retune=False,
    verify="fast",
    memory="auto",
    transfer="auto",
    text_encoder="jax",
    text_encoder_device=None,
    no_embedding_cache=False,
    weights=None,
    warmup=False,
    timing=False,
    timing_json=None,
    timing_trace=None,
    trace=None,
    distributed=False,
    coordinator=None,
    num_processes=None,
    process_id=None,
    debug=False,
)


def run_options(**changes: Any) -> RunOptions:
    """The command line's defaults, with these changes."""
    return dataclasses.replace(_DEFAULTS, **changes)
