"""Measures what of a schedule holds for another model: one is fitted on one artifact and run on the others.

    PYTHONPATH=training python benchmarks/transfer.py ARTIFACT ARTIFACT... [--captions 12]

Each artifact is one of a tiny checkpoint and has been calibrated (``wanbuild calibrate``). A schedule is
taken in three ways: as it is, with its levels alone and the solver's own coefficients, and with its levels
moved as the shift of the other model moves them, again with the solver's own coefficients. Printed is how
much nearer to the other's converged video it comes than that model's own steps of the same number, in dB with
intervals of 90 %.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs
from tinywan import checkpoint
from tinywan.yardstick import captions

import wanrun
from wanbuild.calibrate.judge import mean_of, psnr
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.schedules import Schedule

CONVERGED = 100


def forms(schedule: Schedule, source: Manifest, target: Manifest) -> Mapping[str, Schedule]:
    """Returns a schedule for another model, by the name of the way that it is taken."""
    own, other = source.model.defaults, target.model.defaults
    experts = target.model.options
    changed = structs.replace(
        schedule,
        solver=other.solver,
        guidance_scale=other.guidance_scale,
        guidance_scale_2=experts.get("guidance_scale_2"),
        boundary=experts.get("boundary"),
        measured={},
    )
    sigma = np.array(schedule.timesteps) / source.model.num_train_timesteps
    even = sigma / (own.flow_shift - (own.flow_shift - 1) * sigma)
    moved = other.flow_shift * even / (1 + (other.flow_shift - 1) * even)
    levels = structs.replace(changed, coefficients=None)
    return {
        "as it is": changed,
        "levels alone": levels,
        "levels by the shift": structs.replace(
            levels, timesteps=tuple((moved * target.model.num_train_timesteps).tolist())
        ),
    }


def measure(target: Path, sources: list[Path], count: int) -> None:
    """Prints the gains of all other artifacts' schedules on one."""
    manifest = read_manifest(target)
    variant = manifest.model.variant
    with (
        tempfile.TemporaryDirectory() as folder,
        wanrun.load(target, loop="step", embeddings="none") as pipeline,
    ):

        def videos(**options: object) -> list[np.ndarray]:
            made = []
            for text, _ in captions()[:count]:
                media = checkpoint.media(variant, text)
                made.append(pipeline.generate(text, media=media, **options).frames)  # type: ignore[arg-type]
            return made

        converged = videos(num_steps=CONVERGED)

        def near(**options: object) -> np.ndarray:
            return np.array([psnr(*pair) for pair in zip(videos(**options), converged, strict=True)])

        plain: dict[int, np.ndarray] = {}
        for source in sources:
            other = read_manifest(source)
            for name, schedule in other.schedules.items():
                steps = len(schedule.timesteps)
                if steps not in plain:
                    plain[steps] = near(num_steps=steps)
                for form, changed in forms(schedule, other, manifest).items():
                    if form == "levels by the shift" and other.model.defaults.flow_shift == (
                        manifest.model.defaults.flow_shift
                    ):
                        continue  # they do not move
                    file = Path(folder) / "schedule.json"
                    file.write_bytes(msgspec.json.encode(changed))
                    gain = mean_of(near(schedule=str(file)) - plain[steps])
                    print(f"{other.model.variant} -> {variant}  {name:9} {form:20} {gain} dB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--captions", type=int, default=12)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for target in options.artifacts:
        measure(target, [one for one in options.artifacts if one != target], options.captions)


if __name__ == "__main__":
    main()
