"""How live a model is: the first frames after a request, a chunk's parts, and what is between them.

    python benchmarks/live.py ARTIFACT [--chunks 8] [--prompt TEXT] [--steps N] [--repeat 3]

Prints one JSON object: medians over the chunks after the second one, which all have the same length, and
over the repetitions. ``overhead`` is the part of a chunk in no phase, ``first`` the seconds from the
request to the first frames, and ``first_ratio`` those in times of the first chunk's own phases.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click

import wanrun

PHASES = ("text", "prepare", "denoise", "remember", "decode")


@click.command()
@click.argument("artifact", type=Path)
@click.option("--chunks", default=8, help="of each video.")
@click.option("--prompt", default="a red circle moves right on blue ground")
@click.option("--steps", type=int, default=None)
@click.option("--repeat", default=3, help="videos, after one that is not counted.")
def main(artifact: Path, chunks: int, prompt: str, steps: int | None, repeat: int) -> None:
    """Measures live video."""
    with wanrun.load(artifact) as pipeline:
        pipeline.warmup()
        videos = [_video(pipeline, prompt, steps, seed, chunks) for seed in range(repeat + 1)][1:]
        profile = pipeline.profile.name
    first = statistics.median(video[0]["since"] for video in videos)
    own = statistics.median(sum(video[0]["phases"].values()) for video in videos)
    later = [chunk for video in videos for chunk in video[2:]]
    seconds = statistics.median(chunk["seconds"] for chunk in later)
    found = {
        "profile": profile,
        "first": first,
        "first_ratio": first / own,
        "chunk": seconds,
        "frames": later[0]["frames"],
        "frames_per_second": later[0]["frames"] / seconds,
        "overhead": statistics.median(
            1 - sum(chunk["phases"].values()) / chunk["seconds"] for chunk in later
        ),
        "phases": {name: statistics.median(one["phases"][name] for one in later) for name in PHASES},
    }
    print(json.dumps(found, indent=1))


def _video(
    pipeline: wanrun.Pipeline, prompt: str, steps: int | None, seed: int, chunks: int
) -> list[dict[str, Any]]:
    """Returns the facts of a video's first chunks."""
    found: list[dict[str, Any]] = []
    asked = time.perf_counter()
    with pipeline.live(prompt, seed=seed, num_steps=steps) as live:
        for chunk in live:
            phases = {name: chunk.timings.seconds.get(name, 0.0) for name in PHASES}
            since, frames = time.perf_counter() - asked, chunk.frames.shape[1]
            found.append({"since": since, "seconds": chunk.seconds, "frames": frames, "phases": phases})
            if len(found) == chunks:
                break
    return found


if __name__ == "__main__":
    main()
