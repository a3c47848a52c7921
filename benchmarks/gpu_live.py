"""The parts of gpu.py that make live video: Self-Forcing's 1.3B with random weights, and a toy of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_bench import ROOT, Bench
from gpu_rows import COMPILES, Rows, main

SIZE, FRAMES = "832x480", 81
TOY_SIZE, TOY_FRAMES = "96x64", 33
CHUNKS = 8


def live(bench: Bench) -> None:
    """Makes an artifact of live video, and measures its first frames and its later chunks."""
    folder, smoke = bench.folder / "live", bench.smoke
    shutil.rmtree(folder, ignore_errors=True)
    model, size, frames = ("toy", TOY_SIZE, TOY_FRAMES) if smoke else ("self-forcing-1.3b", SIZE, FRAMES)
    words: dict[str, Any] = {"folder": str(folder / "source"), "model": model}
    bench.measure("gpu_live.py", "checkpoint", **words)
    (source,) = (folder / "source").iterdir()
    artifact = folder / "artifact"
    bench.wanbuild("convert", source, "--artifact", artifact)
    shutil.rmtree(source)
    words_of = ("--artifact", artifact, "--target", "local", "--size", size, "--frames", frames)
    seconds = bench.wanbuild("compile", *words_of)
    bench.rows.add(f"wanbuild compile {size}x{frames}", seconds, "s", tolerance=COMPILES)
    bench.measure("gpu_live.py", "chunks", artifact=str(artifact), chunks=4 if smoke else CHUNKS)


def checkpoint(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Writes a checkpoint into ``folder``: ``model``, ``toy`` or one of ``checkpoints.MODELS``."""
    from checkpoints import ensure_checkpoint
    from wanbuild.toy.toy_checkpoint import write_toy

    folder = Path(arguments["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if arguments["model"] == "toy":
        write_toy(folder / "toy", "self-forcing-wan2.1")
    else:
        ensure_checkpoint(folder, arguments["model"], dtype="bfloat16")
    rows.add("checkpoint", note=str(folder))


def chunks(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Measures an ``artifact`` by live.py: so many ``chunks`` of each video."""
    words = [arguments["artifact"], "--chunks", str(arguments["chunks"])]
    command = [sys.executable, str(ROOT / "benchmarks" / "live.py"), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    rows.add("first frames", found["first"], "s", f"{found['first_ratio']:.2f} of the first chunk's own")
    rows.add("a chunk", found["chunk"], "s", f"{found['frames']} frames")
    rows.add("frames a second", found["frames_per_second"], "1/s")
    rows.add("between phases", found["overhead"], "", "part of a chunk", tolerance=COMPILES)
    for name, seconds in found["phases"].items():
        rows.add(f"a chunk's {name}", seconds, "s")


if __name__ == "__main__":
    main(MappingProxyType({"checkpoint": checkpoint, "chunks": chunks}))
