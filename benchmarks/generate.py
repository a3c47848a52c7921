"""Times the whole path at real shapes: convert, compile, start, step, decode; and diffusers beside it.

The checkpoint is random but has the published transformer and VAE configs; the text encoder has the
published width and one layer. Everything runs in processes of its own, as a user would run it, and the
figures of one run belong together: the machine is shared, so compare ratios, not single times.

    python benchmarks/generate.py --model 1.3b --size 448x256 --frames 9 --steps 3 [--reference]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import MODELS, ensure_checkpoint
from peers import diffusers

PROMPT = "A red fox runs through fresh snow at dawn"


def _timed(*command: object) -> float:
    started = time.perf_counter()
    subprocess.run([str(Path(sys.executable).with_name(str(command[0]))), *map(str, command[1:])], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="1.3b")
    parser.add_argument("--size", default="448x256")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="kept, and used again if it holds a checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="of the transformer, where it is too large as published")
    parser.add_argument("--reference", action="store_true", help="also time diffusers in bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.folder or Path(temporary))


def run(options: argparse.Namespace, folder: Path) -> None:
    """Makes what is missing in folder, times every stage and prints a table and a JSON line."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = ensure_checkpoint(folder, options.model, transformer_layers=options.layers)
    artifact = folder / f"artifact-{options.model}"
    figures: dict[str, Any] = {"model": options.model, "size": options.size, "frames": options.frames}
    figures["convert_seconds"] = _timed("wanbuild", "convert", checkpoint, "--artifact", artifact, "--force")
    figures["compile_seconds"] = _timed(
        *("wanbuild", "compile", "--artifact", artifact, "--target", "cpu", "--size", options.size),
        *("--frames", options.frames, "--dtype", options.dtype),
    )
    timing = folder / "timing.json"
    _timed(
        *("wanrun", "--artifact", artifact, "--prompt", PROMPT, "--steps", options.steps, "--overwrite"),
        *("--size", options.size, "--frames", options.frames),
        *("--output", folder / "out.npy", "--timing", "--timing-json", timing),
    )
    figures["wanrun"] = json.loads(timing.read_text())
    ours = figures["wanrun"]
    rows = [
        ("start to first step", ours["process_to_first_step_seconds"]),
        ("start to ready", ours["process_to_ready_seconds"]),
        ("step (median of the rest)", statistics.median(ours["step_seconds"][1:] or ours["step_seconds"])),
        ("VAE decode", ours["decode_seconds"]),
        ("peak RSS, GB", ours["peak_rss_bytes"] / 1e9),
    ]
    theirs: list[float | None] = [None] * len(rows)
    if options.reference:
        width, height = map(int, options.size.split("x"))
        reference = figures["reference"] = diffusers(
            checkpoint, (width, height), options.frames, (PROMPT, ""), steps=options.steps, decode=True
        )
        theirs = [
            reference["start_to_first_step_seconds"],
            reference["import_seconds"] + reference["load_seconds"],
            statistics.median(reference["step_seconds"]),
            reference["decode_seconds"],
            None,
        ]
    print(f"{'':<26} {'artifact':>10} {'diffusers':>10} {'ratio':>7}")
    for (name, value), other in zip(rows, theirs, strict=True):
        print(f"{name:<26} {value:>10.2f}" + (f" {other:>10.2f} {value / other:>7.2f}" if other else ""))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
