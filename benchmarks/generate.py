"""Times the whole path at published shapes: convert, compile, start, step, decode; and diffusers.

The checkpoint is random but has the published transformer, image encoder and VAE configs; the text encoder
has the published width and one layer. Images and videos are synthetic PNG files: a video is a folder of
frames. Every command runs in its own process, as a user would run it. The figures of one run belong together:
the machine is shared, so compare ratios, not single times.

    python benchmarks/generate.py --model 1.3b --size 448x256 --frames 9 --steps 3 [--reference]
    python benchmarks/generate.py --model animate-14b --layers 5 --size 448x256 --frames 9 --reference
    python benchmarks/generate.py --target cpu-v3 --reference      # a CPU level below this one's

The reference computes in the dtype that is the fastest on the target's CPUs. For a CPU level below this
machine's, its libraries are limited to that level too, by their own variables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints import MODELS, ensure_checkpoint
from cpus import cpu_name, fair_dtype, limits
from pagecache import warm
from peers import diffusers
from processes import clean_environment
from wanbuild.toy.toy_checkpoint import write_samples
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.media import MediaOption
from wanrun.artifact.task import Input

PROMPT = "A red fox runs through fresh snow at dawn"


def _timed(*command: object) -> float:
    started = time.perf_counter()
    subprocess.run([str(Path(sys.executable).with_name(str(command[0]))), *map(str, command[1:])], check=True)
    return time.perf_counter() - started


def _warm(folder: Path) -> None:
    """Reads all files, so that both sides find them in the page cache."""
    warm([path for path in folder.rglob("*") if path.is_file()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="1.3b")
    parser.add_argument("--size", default="448x256")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="kept, and used again if it holds a checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="of the transformer, where it is too large as published")
    parser.add_argument("--optional", action="store_true", help="with what may be left out; VACE always is")
    parser.add_argument("--target", default="cpu", help="cpu, or a CPU level")
    parser.add_argument("--reference", action="store_true", help="also time diffusers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.folder or Path(temporary))


def media_files(
    folder: Path, inputs: Mapping[MediaOption, Input], options: argparse.Namespace
) -> dict[str, Path]:
    """Writes an image or a folder of frames for each of a model's inputs; returns paths by option.

    References of a VACE model are left out, because its profile is built without them.

    Args:
        folder: the folder to write into.
        inputs: the model's inputs.
        options: the command line.
    """
    # VACE models exist to edit a video, so they are measured with one.
    optional = options.optional or "video" in inputs
    names = [
        name
        for name, item in inputs.items()
        if item.kind != "images" and item.mode is None and (item.required or optional)
    ]
    width, height = map(int, options.size.split("x"))
    write_samples(folder, names, (width, height), options.frames, face=512)
    paths = {name: folder / name for name in names}
    return {name: path if path.is_dir() else path.with_suffix(".png") for name, path in paths.items()}


def run(options: argparse.Namespace, folder: Path) -> None:
    """Creates what is missing in folder, times every stage, and prints a table and a JSON line."""
    folder.mkdir(parents=True, exist_ok=True)
    variant = variants()[MODELS[options.model][0]]
    checkpoint = ensure_checkpoint(folder, options.model, transformer_layers=options.layers)
    artifact = folder / f"artifact-{options.model}"
    media = media_files(folder / "media", variant.inputs, options)
    figures: dict[str, Any] = {"model": options.model, "size": options.size, "frames": options.frames}
    figures |= {"cpu": cpu_name(), "target": options.target, "dtype": options.dtype}
    figures["convert_seconds"] = _timed("wanbuild", "convert", checkpoint, "--artifact", artifact, "--force")
    figures["compile_seconds"] = _timed(
        *("wanbuild", "compile", "--artifact", artifact, "--target", options.target),
        *("--size", options.size),
        *("--frames", options.frames, "--dtype", options.dtype),
    )
    timing = folder / "timing.json"
    _warm(artifact)
    _timed(
        *("wanrun", "--artifact", artifact, "--prompt", PROMPT, "--steps", options.steps, "--overwrite"),
        *("--size", options.size, "--frames", options.frames, "--target", options.target),
        *(word for name, path in media.items() for word in (f"--{name.replace('_', '-')}", path)),
        *("--output", folder / "out.npy", "--timing", "--timing-json", timing),
    )
    figures["wanrun"] = json.loads(timing.read_text())
    ours, theirs = wanrun_rows(figures["wanrun"]), dict[str, float]()
    if options.reference:
        width, height = map(int, options.size.split("x"))
        figures["reference_dtype"] = fair_dtype(options.target)
        _warm(checkpoint)
        figures["reference"] = diffusers(
            *(checkpoint, (width, height), options.frames, (PROMPT, "")),
            steps=options.steps,
            decode=True,
            variant=variant.name,
            media=media,
            guidance_scale=read_manifest(artifact).model.defaults.guidance_scale,
            dtype=figures["reference_dtype"],
            environment=clean_environment(**limits(options.target)),
        )
        theirs = reference_rows(figures["reference"])
    print(f"{figures['cpu']}; artifact {options.target}, {options.dtype}", end="")
    print(f"; diffusers {figures['reference_dtype']}" if options.reference else "")
    print(f"{'':<34} {'artifact':>10} {'diffusers':>10} {'ratio':>7}")
    for name, value in ours.items():
        other = theirs.get(name)
        print(f"{name:<34} {value:>10.2f}" + (f" {other:>10.2f} {value / other:>7.2f}" if other else ""))
    print(json.dumps(figures))


def wanrun_rows(timing: Mapping[str, Any]) -> dict[str, float]:
    """Returns the table's first column, from ``--timing-json``."""
    steps = timing["step_seconds"]
    return {
        "start to ready": timing["process_to_ready_seconds"],
        "images and videos: reading": timing.get("read_media_seconds", 0.0),
        "images and videos: encoding": timing.get("encode_media_seconds", 0.0),
        "start to the end of the first step": timing["process_to_first_step_seconds"],
        "first step, after keys and values": steps[0],  # prepare returns before it has finished
        "step (median of the rest)": statistics.median(steps[1:] or steps),
        "VAE decode": timing["decode_seconds"],
        "peak RSS, GB": timing["peak_rss_bytes"] / 1e9,
    }


def reference_rows(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the second column: diffusers' values for rows of the first."""
    return {
        "start to ready": figures["import_seconds"] + figures["load_seconds"],
        "images and videos: reading": figures["read_media_seconds"],
        "images and videos: encoding": figures["encode_media_seconds"],
        "start to the end of the first step": figures["start_to_first_step_seconds"],
        "step (median of the rest)": statistics.median(figures["step_seconds"]),
        "VAE decode": figures["decode_seconds"],
        "peak RSS, GB": figures["peak_rss_bytes"] / 1e9,
    }


if __name__ == "__main__":
    main()
