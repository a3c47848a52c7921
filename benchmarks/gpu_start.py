"""The parts of gpu.py that start artifacts of published models, whose weights are zeros.

As a script it drops files from the page cache (``python gpu_start.py drop JSON``) or puts arrays on a device.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_artifact import FRAMES, PROMPT, SIZE, cache_words, own_toy, run_wanrun
from gpu_bench import HERE, Bench, device_bytes
from gpu_rows import COMPILES, Rows, main

SHAPE = ("832x480", 81)
"""The size and frames of the published models."""
STORED: Mapping[str, str] = MappingProxyType({"1.3b": "float32", "14b": "bfloat16"})
"""By model: the dtype of the checkpoint that is converted; float32, as published, has twice the bytes."""
STREAMED = 4
"""Steps of which the first does not count."""
PINNED = "pinned_host"
"""JAX's kind of the host's memory that a device reads by itself."""
SMALL_CARD = 24e9
"""Bytes of the memory of a card that people have."""


def _shape(bench: Bench) -> tuple[str, int]:
    return (SIZE, FRAMES) if bench.smoke else SHAPE


def _converted(bench: Bench, model: str) -> Path:
    """Returns an artifact of a model full of zeros, without programs; converts it once."""
    folder = bench.folder / f"converted-{model}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        words = {"folder": str(folder), "model": model, "dtype": STORED[model]}
        bench.measure("gpu_artifact.py", "checkpoint", **words)
        (source,) = folder.glob("checkpoint-*")
        seconds = bench.wanbuild("convert", source, "--artifact", folder / "artifact")
        bench.rows.add("convert", seconds, "s", tolerance=COMPILES)
        (folder / "ready").touch()
    return folder / "artifact"


def build(bench: Bench, model: str) -> None:
    """Converts and compiles a model for this machine, whose artifact other parts take."""
    artifact, (size, frames) = _converted(bench, model), _shape(bench)
    words = ("--size", size, "--frames", frames, "--loop", "step", "--target", "local")
    seconds = bench.wanbuild("compile", "--artifact", artifact, *words)
    note = "with autotuning"
    bench.rows.add(f"wanbuild compile {size}x{frames}", seconds, "s", note, tolerance=COMPILES)


def start(bench: Bench, model: str) -> None:
    """Times starts: from the command until it is ready, and until its first step is done.

    The files are in the page cache, but for the last start, before which they are dropped. A smoke run has
    only this one, of the toy.
    """
    name = "toy" if bench.smoke else model
    artifact = own_toy(bench, f"start-{model}") if bench.smoke else _converted(bench, model)
    for attempt in ("cold",) if bench.smoke else ("first", "second", "cold"):
        if attempt == "cold":
            bench.measure("gpu_start.py", "drop", folder=str(artifact))
        found = _started(bench, artifact)
        timing = found["timing"]
        gigabytes, seconds = timing["restore_bytes"] / 1e9, timing["restore_seconds"]
        ready = timing["process_to_ready_seconds"]
        bench.rows.add(f"{name} until ready, {attempt}", ready, "s", cache_words(timing))
        rate = f"{gigabytes:.2f} GB, {gigabytes / seconds:.2f} GB/s" if seconds else ""
        bench.rows.add(f"{name} restore, {attempt}", seconds, "s", rate)
        bench.rows.add(f"{name} executables, {attempt}", timing["executables_seconds"], "s")
        bench.rows.add(f"{name} until its first step is done, {attempt}", found["elapsed_seconds"], "s")


def build_and_start(bench: Bench, model: str) -> None:
    """Builds a model and times its starts, where both fit into a part; a smoke run starts the toy."""
    if not bench.smoke:
        build(bench, model)
    start(bench, model)


def _started(bench: Bench, artifact: Path) -> dict[str, Any]:
    """Runs ``wanrun`` up to its first step; returns what probes.py does, raises as ``Bench.run``."""
    (size, frames), result = _shape(bench), artifact.parent / "started.json"
    words = ["--artifact", artifact, "--size", size, "--frames", frames, "--prompt", PROMPT, "--steps", 2]
    words += ["--no-embedding-cache", "--output", artifact.parent / "started.npy"]
    payload = {"arguments": [str(word) for word in words], "stop": 1, "result": str(result)}
    payload["spawned"] = time.monotonic()
    bench.run("wanrun", [sys.executable, "-P", HERE / "probes.py", "command", json.dumps(payload)])
    return json.loads(result.read_text())


def drop(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Drops all of the page cache; in a smoke run, whose host is shared, only an artifact's files."""
    from pagecache import cold, cold_machine

    files = [path for path in Path(arguments["folder"]).rglob("*") if path.is_file()]
    way = f"the artifact's files, {cold(files):.0%} left" if arguments["smoke"] else cold_machine(files)
    rows.add("dropped from the page cache", note=way)


def put(bench: Bench) -> None:
    """Times the ways of host arrays to the device."""
    bench.measure("gpu_start.py", "puts")


def puts(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Times ``device_put`` of arrays that XLA stages in pinned memory, of one too large, and from there.

    The first of a kind also allocates pinned memory, and is in the note.
    """
    import jax
    import numpy as np

    device = jax.devices()[0]
    size = 2**20 if arguments["smoke"] else 2**31
    whole = np.ones(size, np.uint8)
    ways: dict[str, Callable[[], Any]] = {
        "in four arrays": lambda: jax.device_put(np.split(whole, 4), device),
        "in one array": lambda: jax.device_put(whole, device),
    }
    if PINNED in {memory.kind for memory in device.addressable_memories()}:
        there = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
        pinned = jax.block_until_ready(jax.device_put(whole, there))
        ways["into pinned memory"] = lambda: jax.device_put(whole, there)
        own = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        ways["from pinned memory"] = lambda: jax.device_put(pinned, own)
    for name, way in ways.items():
        with rows.attempt(f"put {name}"):
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                jax.block_until_ready(way())
                seconds.append(time.perf_counter() - began)
            rate = size / 1e9 / statistics.median(seconds[1:])
            rows.add(
                f"put {name}", rate, "GB/s", f"first {size / 1e9 / seconds[0]:.3g} GB/s, {size / 1e9:.3g} GB"
            )


def stream(bench: Bench) -> None:
    """Makes steps of 1.3B whose layers stream through the device, and of one whose layers stay there.

    A smoke run makes only the first: other parts make the second. The weights are zeros: what counts are the
    transfers, of which a step brings all layers.
    """
    model = "toy" if bench.smoke else "1.3b"
    artifact = own_toy(bench, "stream") if bench.smoke else _converted(bench, model)
    for loop, memory in (("stream", "stream"), ("step", "auto"))[: 1 if bench.smoke else 2]:
        _steps(bench, artifact, f"{model} step, --loop {loop}", loop, memory)


def stream_14b(bench: Bench) -> None:
    """Makes steps of 14B whose layers stream, where JAX may use no more memory than a small card has."""
    share = f"{SMALL_CARD / device_bytes():.4f}"
    what = f"14b step, --loop stream in {SMALL_CARD / 1e9:.0f} GB"
    _steps(bench, _converted(bench, "14b"), what, "stream", "stream", XLA_PYTHON_CLIENT_MEM_FRACTION=share)


def _steps(bench: Bench, artifact: Path, what: str, loop: str, memory: str, **environment: str) -> None:
    """Compiles a form of the loop and times its steps."""
    size, frames = _shape(bench)
    profile = ("--size", size, "--frames", frames, "--loop", loop)
    seconds = bench.wanbuild("compile", "--artifact", artifact, *profile, "--target", "local")
    bench.rows.add(f"wanbuild compile --loop {loop}", seconds, "s", tolerance=COMPILES)
    with bench.rows.attempt(f"--loop {loop}"):
        timings = run_wanrun(bench, artifact, *profile, "--memory", memory, steps=STREAMED, **environment)
        steps = timings["step_seconds"]
        bench.rows.add(what, statistics.median(steps[1:]), "s", f"first {steps[0]:.3f} s")


if __name__ == "__main__":
    main(MappingProxyType({"drop": drop, "puts": puts}))
