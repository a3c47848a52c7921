"""Measures how long no program runs between the videos of one run of wanrun.

The checkpoint has the published shapes, few layers and random weights. The time counts from the first step to
the end of the last video's decoder. A program runs in the spans ``text``, ``encode_media``, ``prepare``,
``denoise`` and ``decode``; in the others files are read and written, and a call waits. The steps of few
layers are short, so that the share of an artifact of all layers is smaller.

    python benchmarks/idle.py --model 1.3b --layers 2 --size 832x480 --frames 17 --videos 10 --steps 4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoints import MODELS, ensure_checkpoint
from cpus import cpu_name
from wanrun.timing.spans import length

PROGRAMS = ("text", "encode_media", "prepare", "denoise", "decode")


def command(name: str, *arguments: object) -> None:
    """Runs a command of this environment."""
    subprocess.run([str(Path(sys.executable).with_name(name)), *map(str, arguments)], check=True)


def idle_share(spans: list[tuple[str, float, float]]) -> tuple[float, float]:
    """Returns the seconds from the first step to the last decoder's end, and those without a program."""
    ran = [(start, end) for name, start, end in spans if name.split()[0] in PROGRAMS]
    begin = min(start for name, start, _ in spans if name == "denoise")
    until = max(end for name, _, end in spans if name.split()[0] == "decode")
    return until - begin, until - begin - length(ran, begin, until)


def main() -> None:
    """Builds, runs and prints the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--videos", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("/tmp/wan-idle"), help="checkpoint and artifact")
    options = parser.parse_args()
    checkpoint = ensure_checkpoint(options.work, options.model, transformer_layers=options.layers)
    artifact = options.work / f"artifact-{options.model}-{options.size}x{options.frames}"
    if not artifact.exists():
        command("wanbuild", "convert", checkpoint, "--artifact", artifact)
        shape = ("--size", options.size, "--frames", options.frames)
        command("wanbuild", "compile", "--artifact", artifact, "--no-guidance", *shape)
    with tempfile.TemporaryDirectory() as folder:
        prompts, times = Path(folder, "prompts.txt"), Path(folder, "times.json")
        prompts.write_text("".join(f"video number {number}\n" for number in range(options.videos)))
        output = ("--output", Path(folder, "o.mp4"), "--timing-json", times)
        command(
            "wanrun",
            *("--artifact", artifact, "--prompts", prompts, "--steps", options.steps, "--solver", "euler"),
            *output,
        )
        seconds, idle = idle_share(json.loads(times.read_text())["spans"])
    print(
        f"{cpu_name()}: {options.videos} videos in {seconds:.1f} s, {idle:.2f} s without a program: "
        f"{idle / seconds:.1%}"
    )


if __name__ == "__main__":
    main()
