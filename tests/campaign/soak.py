"""Generations of random options from four threads, for an hour: the same videos, and a steady process.

python -m campaign.soak --seconds 3600 --log soak.jsonl

Profiles are mixed, some calls are wrong, and some are cancelled in their callback. Every request is made
several times, and has to give the same bits. Memory, threads and descriptors at the end are compared with
those after the first quarter, in which the allocator finds its size.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from campaign.sources import toy
from helpers.memory import resident_bytes
from wanrun.denoising.solvers import SOLVERS

THREADS = 4
SAMPLE_SECONDS = 5.0
MEMORY_GROWTH = 0.02
"""Of the resident memory after the first quarter."""


class CancelError(Exception):
    """Raised in a callback."""


def build(folder: Path) -> Path:
    """An artifact with four profiles: two sizes, each with guidance and without."""
    from wanbuild.build import compile_artifact, convert
    from wanbuild.build_options import BuildOptions, CompileRequest
    from wanbuild.conversion.convert_request import ConvertRequest

    artifact = folder / "artifact"
    if not artifact.exists():
        stored = dict.fromkeys(("transformer", "text_encoder"), "float32")
        convert(ConvertRequest(toy(folder, "wan2.1-t2v"), artifact, stored))
        sizes, options = [(64, 32), (96, 64)], BuildOptions(dtype="float32")
        compile_artifact(CompileRequest(artifact, ["cpu"], sizes, [5], (True, False), options=options), print)
    return artifact


def request_of(rng: random.Random) -> dict[str, Any]:
    """One of some hundred requests; every sixteenth is wrong."""
    request: dict[str, Any] = {
        "prompt": rng.choice(("a fox", "an owl in the snow", "a long story " * 40)),
        "size": rng.choice(((64, 32), (96, 64))),
        "num_frames": 5,
        "seed": rng.randrange(2),
        "num_steps": rng.choice((2, 3)),
        "guidance_scale": rng.choice((1.0, 4.0)),
        "solver": rng.choice(tuple(SOLVERS)),
        "loop": rng.choice(("step", "scan")),
    }
    if rng.random() < 1 / 16:
        request |= rng.choice(({"size": (8, 8)}, {"num_steps": 0}, {"solver": "none"}, {"seed": -2}))
    return request


class Soak:
    """Calls of one pipeline from threads, and what came of them."""

    def __init__(self, pipeline: Any, seed: int) -> None:
        self._pipeline, self._seed = pipeline, seed
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def work(self, thread: int, end: float) -> None:
        """Generates until a time."""
        rng = random.Random(self._seed * THREADS + thread)
        while time.monotonic() < end:
            verdict = self._generate(request_of(rng), cancelled=rng.random() < 1 / 8)
            with self._lock:
                self.counts[verdict] += 1

    def _generate(self, request: dict[str, Any], cancelled: bool) -> str:
        from wanrun.errors import WanError

        def on_step(step: int, total: int) -> None:
            if cancelled:
                raise CancelError

        try:
            result = self._pipeline.generate(**request, on_step=on_step)
        except CancelError:
            return "cancelled"
        except WanError:
            return "refused"
        digest = hashlib.sha256(result.frames.tobytes() + result.latents.tobytes()).hexdigest()
        with self._lock:
            known = self._digests.setdefault(json.dumps(request), digest)
        return "the same" if known == digest else f"ANOTHER VIDEO: {request}"


def state() -> dict[str, int]:
    """Resident bytes, threads and open descriptors of this process."""
    return {
        "resident": resident_bytes(),
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208 - names alone
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


def growth(states: list[dict[str, int]]) -> list[str]:
    """What is larger in the last quarter than it was in the second one."""
    quarter = max(1, len(states) // 4)
    found = []
    for name, most in (("resident", MEMORY_GROWTH), ("threads", 0.0), ("descriptors", 0.0)):
        before = statistics.median(one[name] for one in states[quarter : 2 * quarter])
        after = statistics.median(one[name] for one in states[-quarter:])
        if after > before * (1 + most):
            found.append(f"{name}: {before:.0f} after a quarter, {after:.0f} at the end")
    return found


def soak(
    artifact: Path, seconds: float, seed: int, log: Path | None = None
) -> tuple[Counter[str], list[str]]:
    """Runs it.

    Returns:
        The calls by verdict, and what was wrong.
    """
    import wanrun

    states = []
    end = time.monotonic() + seconds
    with wanrun.load(artifact) as pipeline, ThreadPoolExecutor(THREADS) as threads:
        one = Soak(pipeline, seed)
        calls = [threads.submit(one.work, thread, end) for thread in range(THREADS)]
        while time.monotonic() < end and not any(call.done() for call in calls):  # done early: it raised
            time.sleep(min(SAMPLE_SECONDS, seconds / 40))
            states.append(state())
            if log is not None:
                with log.open("a") as file:
                    print(json.dumps({**states[-1], "calls": one.counts.total()}), file=file)
        for call in calls:
            call.result()
    wrong = [verdict for verdict in one.counts if verdict.startswith("ANOTHER")]
    return one.counts, wrong + growth(states)


@click.command()
@click.option("--seconds", type=float, default=3600.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--log", type=click.Path(path_type=Path), help="A line for each moment.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Of the artifact.  [default: a temporary one]"
)
def main(seconds: float, seed: int, log: Path | None, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        counts, wrong = soak(build(place), seconds, seed, log)
    print(json.dumps(counts), *wrong, state(), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
