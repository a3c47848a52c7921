"""Times a start and a generation without an artifact: diffusers, in a separate process.

``diffusers`` runs this file as a script: ``python peers.py diffusers JSON``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
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
    variant: str = "wan2.1-t2v",
    media: Mapping[str, Path] = MappingProxyType({}),
    guidance_scale: float = 5.0,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Times a diffusers pipeline with a float32 VAE, loaded as its documentation says.

    Args:
        checkpoint: folder in the published layout.
        size: width and height in pixels.
        frames: frames of the video.
        prompts: positive and negative.
        steps: denoising steps.
        stop_after: ends the process after this many steps.
        decode: whether the VAE decodes at the end; not if ``stop_after`` ends the process.
        compiled: whether to use torch.compile on the transformer.
        threads: torch's threads; None: its default.
        timeout: seconds.
        environment: environment of the process.
        variant: the checkpoint's variant; without media, the text pipeline is used.
        media: image files and folders of frames, by option.
        guidance_scale: guidance scale; only above 1 is the negative prompt used.
        dtype: torch's dtype of everything but the VAE.

    Returns:
        ``import``, ``load``, ``text``, ``read_media`` (opening files, resizing), ``encode_media`` (the image
        encoder, the VAE's encoder), ``face`` (Animate's motion encoder, in all steps until the end),
        ``start_to_first_step`` (from the start of the process), ``decode`` and ``wall`` in seconds under
        their names with ``_seconds``; ``step_seconds`` of the second and later steps; ``peak_rss_bytes``.
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
        "variant": variant,
        "media": {name: str(path) for name, path in media.items()},
        "guidance_scale": guidance_scale,
        "dtype": dtype,
    }
    return measure(
        Path(__file__),
        "diffusers",
        arguments,
        timeout=timeout,
        environment={**(environment or clean_environment()), "HF_HUB_OFFLINE": "1"},
    )


class Stopwatch:
    """Sums the time of calls of some functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times a block."""
        self._depth += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.monotonic() - started

    def watch(self, owner: Any, name: str) -> None:
        """Times a method of an object from now on."""
        function = getattr(owner, name)

        def timed(*values: Any, **options: Any) -> Any:
            with self.running():
                return function(*values, **options)

        setattr(owner, name, timed)


def _run_diffusers(arguments: dict[str, Any]) -> None:
    started = time.monotonic()
    import diffusers
    import torch

    diffusers.WanPipeline  # noqa: B018  imports what all pipelines share
    imported = time.monotonic()
    from wanbuild.check.reference_pipeline import Reference, open_media
    from wanrun.media.inputs import Media
    from wanrun.timing.timings import peak_rss_bytes

    begun = time.monotonic()
    if arguments["threads"]:
        torch.set_num_threads(arguments["threads"])
    reference = Reference(Path(arguments["checkpoint"]), arguments["variant"], arguments["dtype"])
    pipe = reference.pipe if arguments["media"] else reference.text_pipeline()
    if arguments["compiled"]:
        pipe.transformer.compile()
    loaded = time.monotonic()
    text, reading, encoding, face, decoding = (Stopwatch() for _ in range(5))
    text.watch(pipe, "encode_prompt")
    encoding.watch(pipe.vae, "encode")
    decoding.watch(pipe.vae, "decode")
    if hasattr(pipe, "encode_image"):
        encoding.watch(pipe, "encode_image")
    if (motion_encoder := getattr(pipe.transformer, "motion_encoder", None)) is not None:
        face.watch(motion_encoder, "forward")
    for name in ("video_processor", "video_processor_for_mask", "vae_image_processor"):
        for method in ("preprocess", "preprocess_video"):
            if hasattr(getattr(pipe, name, None), method):
                reading.watch(getattr(pipe, name), method)
    step_ends: list[float] = []

    def leave() -> None:
        result = {
            "interpreter_seconds": started - arguments["spawned"],
            "import_seconds": imported - started,
            "load_seconds": loaded - begun,
            "text_seconds": text.seconds,
            "read_media_seconds": reading.seconds,
            "encode_media_seconds": encoding.seconds,
            "face_seconds": face.seconds,
            "start_to_first_step_seconds": step_ends[0] - arguments["spawned"],
            "step_seconds": [b - a for a, b in itertools.pairwise(step_ends)],
            "decode_seconds": decoding.seconds,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        Path(arguments["result"]).write_text(json.dumps(result))
        os._exit(0)

    def on_step(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        del step, timestep
        step_ends.append(time.monotonic())
        if len(step_ends) == arguments["stop_after"]:
            leave()
        return tensors

    width, height = arguments["size"]
    prompt, negative_prompt = arguments["prompts"]
    with reading.running():
        files = {name: open_media(path) for name, path in arguments["media"].items()}
    reference.call(
        pipe,
        Media(**files) if files else None,
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=arguments["frames"],
        num_inference_steps=arguments["steps"],
        guidance_scale=arguments["guidance_scale"],
        output_type="np" if arguments["decode"] else "latent",
        callback_on_step_end=on_step,
    )
    leave()


def main() -> None:
    scripts: dict[str, Callable[[dict[str, Any]], None]] = {"diffusers": _run_diffusers}
    scripts[sys.argv[1]](json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
