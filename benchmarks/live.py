"""How live a model is: the first frames after a request, a chunk's parts, and what is between them.

    python benchmarks/live.py ARTIFACT [--chunks 8] [--prompt TEXT] [--steps N] [--repeat 3] [--serve]

Prints one JSON object: medians over the chunks after the second one, which all have the same length, and
over the repetitions. ``overhead`` is the part of a chunk in no phase, ``first`` the seconds from the
request to the first frames, and ``first_ratio`` those in times of the first chunk's own phases. ``served``
has the same of ``wanrun serve`` in a process of its own: the seconds from POST to the first byte of
``GET .../live``, and those in times of the first chunk's own phases, and of a later chunk's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

import wanrun
from serve_client import Server, served

PHASES = ("text", "prepare", "denoise", "remember", "decode")


@click.command()
@click.argument("artifact", type=Path)
@click.option("--chunks", default=8, help="of each video.")
@click.option("--prompt", default="a red circle moves right on blue ground")
@click.option("--steps", type=int, default=None)
@click.option("--repeat", default=3, help="videos, after one that is not counted.")
@click.option("--serve", is_flag=True, help="Measure over HTTP too.")
def main(artifact: Path, chunks: int, prompt: str, steps: int | None, repeat: int, serve: bool) -> None:
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
    if serve:
        body = {"prompt": prompt, "live": True, "num_frames": sum(one["frames"] for one in videos[0][:2])}
        byte = _first_byte(artifact, body if steps is None else {**body, "num_steps": steps}, repeat)
        later_own = statistics.median(sum(chunk["phases"].values()) for chunk in later)
        found["served"] = {"first": byte, "first_ratio": byte / own, "later_ratio": byte / later_own}
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


def _first_byte(artifact: Path, body: dict[str, Any], repeat: int) -> float:
    """Returns the seconds from a request to the video's first byte: the median, after one not counted."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "data", artifact) as server:
        return statistics.median([_since(server, {**body, "seed": seed}) for seed in range(repeat + 1)][1:])


def _since(server: Server, body: dict[str, Any]) -> float:
    """Makes a live video, reads it to its end, and returns the seconds until its first byte."""
    asked = time.perf_counter()
    id = server.call("POST", "/v1/videos", body).json["id"]
    with contextlib.closing(http.client.HTTPConnection(server.host, server.port)) as connection:
        connection.request("GET", f"/v1/videos/{id}/live")
        answer = connection.getresponse()
        answer.read(1)
        since = time.perf_counter() - asked
        answer.read()
    server.ended(id)
    return since


if __name__ == "__main__":
    main()
