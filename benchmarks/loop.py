"""Times the two forms of the denoising loop: one call per step, and one call for all steps.

Both forms of one artifact take turns in one process, from the same noise, so that their ratio is meaningful
on a shared machine. It also prints Python's time between two steps, the temporaries of both programs, and
whether the latents have the same bits.

    python benchmarks/loop.py                               # a toy: what a step costs beyond its arithmetic
    python benchmarks/loop.py --model 1.3b --size 448x256 --frames 9 --steps 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import wanrun
from checkpoints import MODELS, ensure_checkpoint
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.artifact.programs import with_role
from wanrun.artifact.roles import forms_of

FORMS = forms_of("both")
"""The forms of whole steps; each has one program, whose role has its name."""


def ensure_artifact(folder: Path, options: argparse.Namespace) -> Path:
    """Creates the artifact unless it exists with this profile."""
    if options.model == "toy":
        checkpoint = folder / "checkpoint-toy"
        if not checkpoint.exists():
            write_toy(checkpoint)
    else:
        checkpoint = ensure_checkpoint(folder, options.model)
    artifact = folder / f"artifact-loop-{options.model}"
    if not (artifact / MANIFEST).exists():
        convert(ConvertRequest(checkpoint, artifact))
    width, height = map(int, options.size.split("x"))
    compile_artifact(CompileRequest(artifact, ["cpu"], [(width, height)], [options.frames]), print)
    return artifact


def measure(artifact: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds per step of each form, by round, and the other figures."""
    width, height = map(int, options.size.split("x"))
    steps: dict[str, list[float]] = {form: [] for form in FORMS}
    overhead: list[float] = []
    latents: dict[str, np.ndarray] = {}
    with wanrun.load(artifact, size=(width, height), num_frames=options.frames) as pipeline:
        for round_number in range(options.rounds + 1):
            for form in FORMS if round_number % 2 else FORMS[::-1]:
                result = pipeline.generate("a red fox", num_steps=options.steps, loop=form)
                timings = result.timings
                latents[form] = result.latents
                if round_number == 0:  # loads, and touches memory for the first time
                    continue
                steps[form].append(statistics.fmean(timings.step_seconds))
                if form == "step":
                    overhead.append(timings.loop_overhead_seconds or 0.0)
        profile = pipeline.profile.name
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    statistics_of = target.statistics[profile]
    programs = manifest.programs(target, manifest.profiles[profile])
    return {
        "model": options.model,
        "profile": profile,
        "steps": options.steps,
        "step_form_seconds": steps["step"],
        "scan_form_seconds": steps["scan"],
        "scan_over_step": statistics.median(b / a for a, b in zip(steps["step"], steps["scan"], strict=True)),
        "python_overhead_seconds": statistics.median(overhead),
        "temporary_bytes": {
            form: statistics_of[name]["temporary_bytes"]
            for form in FORMS
            for name in with_role(programs, form)[:1]
        },
        "bitwise_equal": bool(np.array_equal(latents["step"], latents["scan"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["toy", *MODELS], default="toy")
    parser.add_argument("--size", default="96x64")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="kept, and used again if it holds a checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(ensure_artifact(folder, options), options)
    for form in FORMS:
        seconds = figures[f"{form}_form_seconds"]
        megabytes = figures["temporary_bytes"][form] / 1e6
        print(
            f"{form:<5} {statistics.median(seconds) * 1e3:>10.2f} ms a step, {megabytes:.1f} MB temporaries"
        )
    print(f"scan / step, median of {len(seconds)} rounds: {figures['scan_over_step']:.3f}")
    print(f"Python between two steps: {figures['python_overhead_seconds'] * 1e3:.3f} ms")
    print(f"latents bit-equal: {figures['bitwise_equal']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
