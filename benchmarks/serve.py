"""Measures ``wanrun serve``: start, latency over ``generate``, many clients, and what kill -9 leaves.

    python benchmarks/serve.py ready|latency|load|kills ARTIFACT [--clients N] [--seconds S] [--times N]

Each part prints one line of JSON. The server and its device share the cores with the clients here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_client import ENDED, Answer, Connection, Server, memory_bytes, served

STEPS = 2


def request(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """A request for a short video of the tiny models."""
    return {"prompt": "a red ball rolls to the right over green ground", "num_steps": steps, "seed": seed}


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def ready(artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the start of the process until a first step could run, of the server and of wanrun."""
    server, command = list[float](), list[float]()
    for number in range(options.times):
        with tempfile.TemporaryDirectory() as folder:
            one = Server(Path(folder) / "data", artifact)
            server.append(one.ready())
            one.end(signal.SIGKILL)
            timings = Path(folder) / "timings.json"
            subprocess.run(
                [
                    *(sys.executable, "-m", "wanrun", str(artifact), "--prompt", f"a prompt {number}"),
                    *("--steps", "1", "--output", f"{folder}/video.mp4", "--timing-json", str(timings)),
                ],
                check=True,
                capture_output=True,
            )
            command.append(json.loads(timings.read_text())["process_to_ready_seconds"])
    pairs = [ours - theirs for ours, theirs in zip(server, command, strict=True)]
    return {
        "server_ready_seconds": statistics.median(server),
        "wanrun_ready_seconds": statistics.median(command),
        "difference_seconds": statistics.median(pairs),
    }


def latency(artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a synchronous request, and of ``generate`` and ``save`` in another process."""
    import wanrun

    over, alone, whole = list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "data", artifact) as server,
        wanrun.load(artifact) as pipeline,
    ):
        for seed in range(options.times + 2):
            given = {"num_steps": options.steps, "seed": seed}
            began = time.monotonic()
            result = pipeline.generate(request(seed)["prompt"], **given)
            made = time.monotonic() - began
            result.save(Path(folder) / "own.mp4", overwrite=True)
            saved = time.monotonic() - began
            began = time.monotonic()
            answer = server.call("POST", "/v1/videos/sync", request(seed, options.steps))
            asked = time.monotonic() - began
            assert answer.body == (Path(folder) / "own.mp4").read_bytes(), "the bytes differ"
            if seed >= 2:  # the first ones load the VAE
                alone.append(made)
                whole.append(asked)
                over.append(asked - saved)
    return {
        "generate_seconds": statistics.median(alone),
        "request_seconds": statistics.median(whole),
        "over_generate_and_save_ms": 1000 * statistics.median(over),
    }


async def _client(server: Server, number: int, until: float, seen: dict[str, Any]) -> None:
    """Asks for videos one after the other, and looks at each until it ends."""
    connection, count = Connection(server.host, server.port), 0
    while time.monotonic() < until:
        key = {"idempotency-key": f"client {number} job {count}"}
        answer = await connection.call("POST", "/v1/videos", request(number * 1000 + count), key)
        if answer.status == 429:
            seen["refused"] += 1
            await asyncio.sleep(int(answer.headers["retry-after"]) * random.uniform(0.5, 1.5))
            continue
        assert answer.status == 200, answer.body
        count += 1
        job = answer.json
        while job["status"] not in ENDED:
            await asyncio.sleep(int(answer.headers["openai-poll-after-ms"]) / 1000)
            began = time.monotonic()
            answer = await connection.call("GET", f"/v1/videos/{job['id']}")
            seen["looks"].append(time.monotonic() - began)
            job = answer.json
        seen["jobs"].append((job["id"], job["status"]))
    connection.close()


def load(artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Many clients for a while: how long a look at a job takes, and whether any job is lost or doubled."""
    seen: dict[str, Any] = {"looks": [], "jobs": [], "refused": 0}

    async def run(server: Server) -> None:
        until = time.monotonic() + options.seconds
        await asyncio.gather(*(_client(server, number, until, seen) for number in range(options.clients)))

    limits = ("--max-waiting", options.clients + 50)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "data", artifact, *limits) as server:
        before, half = memory_bytes(server.process.pid), list[int]()
        timer = threading.Timer(options.seconds / 2, lambda: half.append(memory_bytes(server.process.pid)))
        timer.start()
        asyncio.run(run(server))
        after = memory_bytes(server.process.pid)
        listed = _all(server)
    ids = [id for id, _ in seen["jobs"]]
    assert len(set(ids)) == len(ids), "a job was answered twice"
    assert {one["id"] for one in listed} == set(ids), "a job is lost, or was doubled"
    assert {status for _, status in seen["jobs"]} == {"completed"}
    return {
        "clients": options.clients,
        "videos": len(ids),
        "looks": len(seen["looks"]),
        "look_median_ms": 1000 * statistics.median(seen["looks"]),
        "look_p99_ms": 1000 * quantile(seen["looks"], 0.99),
        "look_most_ms": 1000 * max(seen["looks"]),
        "refused": seen["refused"],
        "memory_before_mb": before / 1e6,
        "memory_half_time_mb": half[0] / 1e6,
        "memory_after_mb": after / 1e6,
    }


def _all(server: Server) -> list[dict[str, Any]]:
    """Every job, page by page."""
    found, after = list[dict[str, Any]](), ""
    while True:
        page = server.call("GET", f"/v1/videos?limit=100{after}").json
        found += page["data"]
        if not page["has_more"]:
            return found
        after = f"&after={page['last_id']}"


def kills(artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kills the server, or its worker, at random moments: each job ends once, and with the same bytes."""
    rng, killed = random.Random(options.seed), {"server": 0, "worker": 0}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        limits = ("--attempts", 1000, "--max-waiting", 1000)
        server = Server(data, artifact, *limits)
        limits = (*limits, "--port", server.port)
        jobs = dict[str, int]()
        for which in rng.sample(["server", "worker"] * options.times, 2 * options.times):
            server = _ask(server, data, (artifact, *limits), jobs, rng)
            time.sleep(rng.uniform(0, 3))
            if which == "server":
                server.end(signal.SIGKILL)
                server = Server(data, artifact, *limits)
            else:
                for pid in server.workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            killed[which] += 1
        _wait(server, len(jobs))
        listed = _all(server)
        assert {one["id"] for one in listed} == jobs.keys(), "a job is lost, or was doubled"
        assert {one["status"] for one in listed} == {"completed"}, [one for one in listed if one["error"]]
        digests = {id: _digest(server.call("GET", f"/v1/videos/{id}/content")) for id in jobs}
        again = {
            seed: _digest(server.call("POST", "/v1/videos/sync", request(seed))) for seed in jobs.values()
        }
        assert all(digests[id] == again[seed] for id, seed in jobs.items()), "the bytes differ"
        attempts = sum(one["attempts"] for one in listed)
        server.end(signal.SIGKILL)
    return {"killed": killed, "jobs": len(jobs), "attempts": attempts, "same_bytes": len(digests)}


def _ask(
    server: Server, data: Path, again: Sequence[object], jobs: dict[str, int], rng: random.Random
) -> Server:
    """Asks for three videos, each by a key, so that asking again makes no second one."""
    for _ in range(3):
        seed = rng.randrange(20)
        key = {"idempotency-key": f"job {len(jobs)}"}
        answer = server.call("POST", "/v1/videos", request(seed), **key)
        assert answer.status == 200, answer.body
        jobs[answer.json["id"]] = seed
    return server


def _wait(server: Server, count: int) -> None:
    """Waits until all jobs have ended."""
    end = time.monotonic() + 120 + count
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if not server.call("GET", "/v1/videos?status=queued,in_progress").json["data"]:
                return
        time.sleep(0.2)
    raise AssertionError("the jobs do not end: " + "\n".join(server.lines[-20:]))


def _digest(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return hashlib.sha256(answer.body).hexdigest()


PARTS = {"ready": ready, "latency": latency, "load": load, "kills": kills}


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps({"part": options.part, **PARTS[options.part](options.artifact, options)}))


if __name__ == "__main__":
    main()
