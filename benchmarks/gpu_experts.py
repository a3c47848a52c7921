"""The parts of gpu.py that run the two experts of A14B: its widths in fewer layers, and random weights."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_artifact import cache_words, own_toy, run_wanrun
from gpu_bench import Bench, device_bytes, manifest_fields
from gpu_rows import COMPILES
from gpu_start import SHAPE

LAYERS = 8
"""Of each expert, of 40: more take longer than a part has, and disk space that the machine may not have."""
STEPS, BOUNDARY, SWITCH = 6, 0.8, 3
"""Steps, of which the second expert makes those from number SWITCH on, counted from 0."""
USED = ("argument_bytes", "output_bytes", "temporary_bytes")
"""Of a program's statistics, what a call takes."""
MOST = 0.92
"""Of the device's memory, where both experts fit."""


def build(bench: Bench) -> None:
    """Makes random weights, converts them and compiles for this machine; ``experts`` takes the artifact.

    A smoke run takes the toy.
    """
    folder, (pixels, frames) = bench.folder / "a14b", SHAPE
    shutil.rmtree(folder, ignore_errors=True)
    if bench.smoke:
        bench.rows.add("artifact", _bytes(own_toy(bench, folder.name)) / 1e9, "GB")
        return
    words: dict[str, Any] = {"folder": str(folder), "model": "a14b", "dtype": "bfloat16"}
    bench.measure("gpu_artifact.py", "checkpoint", **words, layers=LAYERS, random=True)
    (source,) = folder.glob("checkpoint-*")
    artifact = folder / "artifact"
    seconds = bench.wanbuild("convert", source, "--artifact", artifact)
    shutil.rmtree(source)
    size = f"{_bytes(artifact / 'weights') / 1e9:.1f} GB"
    bench.rows.add("convert", seconds, "s", size, tolerance=COMPILES)
    profile = ("--size", pixels, "--frames", frames, "--loop", "step")
    seconds = bench.wanbuild("compile", "--artifact", artifact, *profile, "--target", "local")
    bench.rows.add(f"wanbuild compile {pixels}x{frames}", seconds, "s", tolerance=COMPILES)


def experts(bench: Bench) -> None:
    """Makes steps of both experts: both on the device, one in host memory, and one read at the boundary.

    For the second, JAX has less of the device's memory than both take. A CPU's memory is the host's: a smoke
    run leaves it out.
    """
    artifact = bench.folder / "a14b" / "artifact"
    for placement in ("both", "one") if bench.smoke else ("both", "host", "one"):
        with bench.rows.attempt(placement):
            words = ("--boundary", BOUNDARY, "--no-embedding-cache")
            words += ("--memory", "low") if placement == "one" else ()
            limit = _too_little(artifact) / device_bytes() if placement == "host" else MOST
            share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{limit:.4f}"}
            timings = run_wanrun(bench, artifact, *words, steps=STEPS, **share)
            _report(bench, placement, timings)


def _too_little(artifact: Path) -> float:
    """Bytes of device memory between what one expert takes and what both take, besides the decoding."""
    targets = manifest_fields(artifact)["targets"].values()
    profiles = [programs for target in targets for programs in target["statistics"].values()]
    used = [sum(program[name] for name in USED) for profile in profiles for program in _decodings(profile)]
    weights = artifact / "weights"
    return _bytes(weights) - _bytes(weights / "transformer") / 2 + max(used)


def _decodings(profile: Mapping[str, Any]) -> list[Mapping[str, int]]:
    return [facts for name, facts in profile.items() if name.startswith("decode")]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(bench: Bench, placement: str, timings: Mapping[str, Any]) -> None:
    """Adds the rows of one run.

    Raises:
        RuntimeError: if the experts were elsewhere than they were to be.
    """
    if timings["placement"] != placement:
        raise RuntimeError(f"the experts were to be {placement}, and are {timings['placement']}")
    steps, (high, low) = timings["step_seconds"], _spans(timings, "denoise")
    steady = [seconds for number, seconds in enumerate(steps) if number not in (0, SWITCH)]
    first, gigabytes = timings["process_to_first_step_seconds"], timings["restore_bytes"] / 1e9
    for what, seconds, note in (
        ("until ready", timings["process_to_ready_seconds"], cache_words(timings)),
        ("until its first step is done", first, f"{gigabytes:.2f} GB restored in all"),
        ("from one expert's last step to the other", low[0] - high[1], "with the text for the other"),
        ("the step after it", steps[SWITCH], ""),
        ("a step", statistics.median(steady), f"median of {len(steady)}; the first {steps[0]:.3f} s"),
    ):
        bench.rows.add(f"{placement}: {what}", seconds, "s", note)


def _spans(timings: Mapping[str, Any], phase: str) -> list[tuple[float, float]]:
    """Begin and end of a phase's spans, in order, in seconds since the process started."""
    return [(begin, end) for name, begin, end in timings["spans"] if name == phase]
