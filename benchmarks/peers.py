"""What a start and a generation take without an artifact: diffusers, in a process of its own.

Run as a script by ``diffusers``: ``python peers.py diffusers JSON``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def diffusers(
    checkpoint: Path,
    size: tuple[int, int],
    frames: int,
    prompts: tuple[str, str],
    *,
    steps: int,
    stop_after: int | None = None,
    decode: bool = False,
    compiled: bool = False,
    threads: int | None = None,
    timeout: float = 1800,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Times diffusers' WanPipeline in bfloat16 with a float32 VAE, as its documentation loads it.

    Args:
        checkpoint: folder in the published layout.
        size: width and height in pixels.
        frames: frames of the video.
        prompts: positive and negative.
        steps: denoising steps that are asked for.
        stop_after: the process ends after this many of them.
        decode: whether the VAE decodes at the end; not if it stops before.
        compiled: torch.compile on the transformer.
        threads: torch's; its own default where None.
        timeout: in seconds.
        environment: of the process.

    Returns:
        ``import``, ``load``, ``text``, ``start_to_first_step`` (from the start of the process), ``decode``
        and ``wall`` in seconds under their names with ``_seconds``; ``step_seconds`` of the second step and
        the following ones.
    """
    from processes import clean_environment, measure

    arguments = {
        "checkpoint": str(checkpoint),
        "size": size,
        "frames": frames,
        "prompts": prompts,
        "steps": steps,
        "stop_after": stop_after,
        "decode": decode,
        "compiled": compiled,
        "threads": threads,
    }
    return measure(
        Path(__file__),
        "diffusers",
        arguments,
        timeout=timeout,
        environment={**(environment or clean_environment()), "HF_HUB_OFFLINE": "1"},
    )


def _run_diffusers(arguments: dict[str, Any]) -> None:
    started = time.monotonic()
    import torch
    from diffusers import WanPipeline

    imported = time.monotonic()
    if arguments["threads"]:
        torch.set_num_threads(arguments["threads"])
    pipe = WanPipeline.from_pretrained(arguments["checkpoint"], dtype=torch.bfloat16, local_files_only=True)
    pipe.vae.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if arguments["compiled"]:
        pipe.transformer.compile()
    loaded = time.monotonic()
    encoded: list[float] = []
    step_ends: list[float] = []
    encode_prompt = pipe.encode_prompt

    def timed_encode(*values: Any, **options: Any) -> Any:
        result = encode_prompt(*values, **options)
        encoded.append(time.monotonic())
        return result

    def leave(decode_seconds: float | None) -> None:
        result = {
            "interpreter_seconds": started - arguments["spawned"],
            "import_seconds": imported - started,
            "load_seconds": loaded - imported,
            "text_seconds": encoded[0] - loaded,
            "start_to_first_step_seconds": step_ends[0] - arguments["spawned"],
            "step_seconds": [b - a for a, b in itertools.pairwise(step_ends)],
            "decode_seconds": decode_seconds,
        }
        Path(arguments["result"]).write_text(json.dumps(result))
        os._exit(0)

    def on_step(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        del step, timestep
        step_ends.append(time.monotonic())
        if len(step_ends) == arguments["stop_after"]:
            leave(None)
        return tensors

    pipe.encode_prompt = timed_encode
    width, height = arguments["size"]
    prompt, negative_prompt = arguments["prompts"]
    latents = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=arguments["frames"],
        num_inference_steps=arguments["steps"],
        guidance_scale=5.0,
        output_type="latent",
        callback_on_step_end=on_step,
    ).frames
    if not arguments["decode"]:
        leave(None)
    begun = time.monotonic()
    with torch.no_grad():
        pipe.vae.decode(latents.float())
    leave(time.monotonic() - begun)


def main() -> None:
    scripts: dict[str, Callable[[dict[str, Any]], None]] = {"diffusers": _run_diffusers}
    scripts[sys.argv[1]](json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
