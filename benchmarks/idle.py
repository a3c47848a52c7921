"""Measures how long no program runs between the videos of one run of wanrun, and of a server.

The checkpoint has the published shapes, few layers and random weights. The time counts from the first step to
the end of the last video's decoder. A program runs in the spans ``text``, ``encode_media``, ``prepare``,
``denoise`` and ``decode``; in the others files are read and written, and a call waits. Of the server a client
hears the phases as events, after a first video: a gap inside a phase is not seen. The steps of few layers are
short, so that the share of an artifact of all layers is smaller.

    python benchmarks/idle.py --model 1.3b --layers 2 --size 832x480 --frames 17 --videos 10 --steps 4
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from checkpoints import MODELS, ensure_checkpoint
from cpus import cpu_name
from serve_client import ENDED, served
from wanrun.timing.spans import length

PROGRAMS = ("text", "encode_media", "prepare", "denoise", "decode")

Spans = list[tuple[str, float, float]]


def command(name: str, *arguments: object) -> None:
    """Runs a command of this environment."""
    subprocess.run([str(Path(sys.executable).with_name(name)), *map(str, arguments)], check=True)


def idle_share(spans: Spans) -> tuple[float, float]:
    """Returns the seconds from the first step to the last decoder's end, and those without a program."""
    ran = [(start, end) for name, start, end in spans if name.split()[0] in PROGRAMS]
    begin = min(start for name, start, _ in spans if name == "denoise")
    until = max(end for name, _, end in spans if name.split()[0] == "decode")
    return until - begin, until - begin - length(ran, begin, until)


def of_command(artifact: Path, options: argparse.Namespace) -> Spans:
    """Returns the spans of a prompts file's videos."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, times = Path(folder, "prompts.txt"), Path(folder, "times.json")
        prompts.write_text("".join(f"video number {number}\n" for number in range(options.videos)))
        output = ("--output", Path(folder, "o.mp4"), "--timing-json", times)
        command(
            "wanrun",
            *("--artifact", artifact, "--prompts", prompts, "--steps", options.steps, "--solver", "euler"),
            *output,
        )
        spans: Spans = json.loads(times.read_text())["spans"]
        return spans


def of_server(artifact: Path, options: argparse.Namespace) -> Spans:
    """Returns the phases of a server's videos, as spans."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), artifact) as server:
        connection = http.client.HTTPConnection(server.host, server.port)

        def ask(number: int) -> str:
            fields = {"prompt": f"video number {number}", "num_steps": options.steps, "solver": "euler"}
            return str(server.call("POST", "/v1/videos", fields).json["id"])

        server.until(ask(0), "completed", seconds=3600)
        with closing(connection):
            connection.request("GET", "/v1/events")
            answer = connection.getresponse()
            for number in range(options.videos):
                ask(number)
            return list(phases(answer, options.videos))


def phases(answer: http.client.HTTPResponse, videos: int) -> Iterator[tuple[str, float, float]]:
    """Yields the phases of so many videos that a stream of events tells, once the last one has ended."""
    names, current, ended = {"steps": "denoise", "media": "encode_media"}, dict[str, tuple[str, float]](), 0
    for line in answer:
        if not line.startswith(b"data: {") or "phase" not in (event := json.loads(line[6:])):
            continue
        now, phase = time.monotonic(), event["phase"] or event["status"]
        name, since = current.get(event["id"], (phase, now))
        if phase != name:
            yield names.get(name, name), since, now
        current[event["id"]] = phase, since if phase == name else now
        ended += phase in ENDED and phase != name
        if ended == videos:
            return


def main() -> None:
    """Builds, runs and prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--videos", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("/tmp/wan-idle"), help="checkpoint and artifact")
    parser.add_argument("--only", choices=("command", "server"), help="one of the two")
    options = parser.parse_args()
    checkpoint = ensure_checkpoint(options.work, options.model, transformer_layers=options.layers)
    artifact = options.work / f"artifact-{options.model}-{options.size}x{options.frames}"
    if not artifact.exists():
        command("wanbuild", "convert", checkpoint, "--artifact", artifact)
        shape = ("--size", options.size, "--frames", options.frames)
        command("wanbuild", "compile", "--artifact", artifact, "--no-guidance", *shape)
    for name, measured in (("command", of_command), ("server", of_server)):
        if options.only in (None, name):
            seconds, idle = idle_share(measured(artifact, options))
            what = f"{name}: {options.videos} videos in {seconds:.1f} s"
            print(f"{cpu_name()}, {what}, {idle:.2f} s without a program: {idle / seconds:.1%}", flush=True)


if __name__ == "__main__":
    main()
