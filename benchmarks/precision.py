"""Measures what each precision choice costs: the error against float32, of every choice and the default.

There are three kinds of input. *Random*: a toy's random weights, the whole path, from seed noise; the
velocity is unrelated to the noise in the latents, which stay noise for the VAE. *Trained*: the same
transformers trained for a minute (``training.py``), so that the velocity is mostly predicted, follows the
prompt, and leads to smooth latents. Nothing is scaled down to improve the figures. But rounding adds up over
3 layers here, and over 30 or 40 in a published model, and text encoder and VAE stay random. So this compares
the choices and does not predict a published model. *Smooth*: that VAE alone decodes low-pass filtered noise
of deviation 1.

PSNR is of uint8 frames (peak 255, pooled over the seeds); ``latents`` is the root mean square error of the
final latents relative to their root mean square. Figures are the CPU's, which sums in float32.

    python benchmarks/precision.py [--variant wan2.2-t2v] [--steps 6] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import wanrun
from training import smooth_latents, train
from wanbuild.check.reference import relative_error
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.programs.compile import CompileRequest, compile_artifact
from wanbuild.programs.options import BuildOptions
from wanbuild.toy.checkpoint import write_toy
from wanrun.artifact.manifest import read_manifest

# A transformer narrower than a token's values (64, and 192 of TI2V) could not predict the noise in them.
HEADS: Mapping[str, int] = MappingProxyType({"wan2.1-t2v": 4, "wan2.2-t2v": 4, "wan2.2-ti2v": 10})
PROMPTS = ("a red fox runs", "snow falls on a lake", "a city at night", "waves")
NEGATIVE = "ugly, blurry"
KINDS = ("random", "trained")
BF16, F32 = "bfloat16", "float32"


@dataclass(frozen=True)
class Choice:
    """Dtypes of an artifact; unnamed ones are float32.

    Args:
        weights: weights dtypes for convert, by component.
        options: dtypes for compile, by option.
        donor: the choice whose equal programs are reused.
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    donor: str | None = F32


DEFAULT, ALL = "default", "everything bfloat16"
SCHEDULER, COMPUTE = "--scheduler-dtype bfloat16", "--dtype bfloat16"
CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        F32: Choice(donor=None),
        "--weights-dtype bfloat16": Choice({"transformer": BF16}),
        "--text-weights-dtype bfloat16": Choice({"text_encoder": BF16}),
        "--vae-weights-dtype bfloat16": Choice({"vae": BF16}),
        COMPUTE: Choice(options={"dtype": BF16}),
        "--vae-dtype bfloat16": Choice(options={"vae_dtype": BF16}),
        SCHEDULER: Choice(options={"scheduler_dtype": BF16}),
        DEFAULT: Choice({"transformer": BF16, "text_encoder": BF16}, {"dtype": BF16}),
        ALL: Choice(
            {"transformer": BF16, "text_encoder": BF16, "vae": BF16},
            {"dtype": BF16, "vae_dtype": BF16, "scheduler_dtype": BF16},
            donor=DEFAULT,
        ),
    }
)
DECODERS = (F32, "--vae-weights-dtype bfloat16", "--vae-dtype bfloat16", ALL)
"""The choices with different ``decode_video`` programs; the last has both options."""


@dataclass(frozen=True)
class Run:
    """The options of one generation."""

    solver: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Made:
    """The results of a choice: frames and latents by run, and frames of the smooth latents."""

    runs: Mapping[Run, tuple[np.ndarray, np.ndarray]]
    smooth: np.ndarray


def build(
    checkpoint: Path, artifact: Path, choice: Choice, donor: Path | None, options: argparse.Namespace
) -> None:
    """Creates an artifact; programs that the donor has too are not compiled again.

    The donor's programs and executables are put into the new artifact. Compiling keeps those whose digest
    matches the artifact's own StableHLO.
    """
    if artifact.exists():
        return
    staging = artifact.with_name(f"{artifact.name}.new")
    weights = dict.fromkeys(("transformer", "text_encoder", "vae"), F32) | dict(choice.weights)
    convert(ConvertRequest(checkpoint, staging, weights, force=True))
    if donor is not None:
        given = read_manifest(donor)
        for folder in ("programs", "executables"):
            shutil.copytree(donor / folder, staging / folder, dirs_exist_ok=True)
        read_manifest(staging).changed(
            profiles=given.profiles, program_sets=given.program_sets, targets=given.targets
        ).write(staging)
    dtypes = dict.fromkeys(("dtype", "vae_dtype", "scheduler_dtype"), F32) | dict(choice.options)
    build_options = BuildOptions(**dtypes, loop="step")
    compile_artifact(
        CompileRequest(staging, ["cpu"], [options.size], [options.frames], options=build_options),
        lambda line: None if line.endswith("up to date") else print(f"  {line}", flush=True),
    )
    staging.rename(artifact)


def generate(artifact: Path, runs: Sequence[Run], options: argparse.Namespace) -> Made:
    """Runs all generations of one artifact."""
    made = {}
    with wanrun.load(artifact, size=options.size, num_frames=options.frames, embeddings="none") as pipeline:
        for run in runs:
            result = pipeline.generate(
                PROMPTS[run.seed % len(PROMPTS)],
                NEGATIVE,
                seed=run.seed,
                num_steps=run.steps,
                solver=run.solver,
            )
            made[run] = (result.frames, result.latents)
        shape = (options.seeds, *pipeline.latents_shape[1:])
        return Made(made, pipeline.decode(smooth_latents(shape, seed=0)))


def psnr(found: np.ndarray, expected: np.ndarray) -> float | None:
    """Returns the PSNR of uint8 arrays in dB; None if they are equal."""
    error = np.mean(np.square(found.astype(np.float64) - expected))
    return None if error == 0 else float(10 * np.log10(255**2 / error))


def compare(found: Made, expected: Made, solver: str, steps: int) -> dict[str, float | None]:
    """Returns the error of one solver and number of steps, pooled over the seeds."""
    runs = [run for run in expected.runs if (run.solver, run.steps) == (solver, steps)]
    frames, latents = (
        tuple(np.stack([made.runs[run][part] for run in runs]) for made in (found, expected))
        for part in (0, 1)
    )
    return {"psnr_db": psnr(*frames), "latents": relative_error(*latents)}


def measure(variant: str, folder: Path, donors: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures of one variant.

    Args:
        variant: the variant.
        folder: the folder for checkpoints and artifacts.
        donors: artifacts of another variant, which may share programs.
        options: the command line.
    """
    seeds = range(options.seeds)
    grid = {("unipc", options.steps), *itertools.product(("unipc", "euler"), options.many)}
    few = [Run("unipc", options.steps, seed) for seed in seeds]
    many = [Run(*cell, seed) for cell in sorted(grid) for seed in seeds]
    figures: dict[str, Any] = {"steps": {}, "choices": {}, "smooth": {}, "std": {}}
    random, trained = folder / "checkpoint-random", folder / "checkpoint-trained"
    if not random.exists():
        width = 20 * HEADS[variant]
        sizes = {"num_attention_heads": HEADS[variant], "ffn_dim": 2 * width}
        write_toy(random, variant, configs={"transformer": sizes})
    for kind in KINDS:
        if kind == "trained" and not trained.exists():
            with wanrun.load(folder / f"random-{F32}", embeddings="none") as pipeline:
                embeddings, shape = pipeline.encode_prompts([*PROMPTS, NEGATIVE]), pipeline.latents_shape
            figures["unexplained"] = train(random, trained, shape, embeddings, options.training)
            print(f"  not predicted of the velocity: {figures['unexplained']}", flush=True)
        expected: Made | None = None
        for name, choice in CHOICES.items():
            artifact = folder / f"{kind}-{name}"
            donor = folder / f"random-{name}" if kind == "trained" else donors and donors / f"random-{name}"
            if donor is None and choice.donor:
                donor = folder / f"random-{choice.donor}"
            build(folder / f"checkpoint-{kind}", artifact, choice, donor, options)
            made = generate(artifact, many if name in (F32, SCHEDULER, COMPUTE) else few, options)
            if expected is None:
                expected = made
                figures["std"][kind] = float(np.std([made.runs[run][0] for run in few]))
                figures["std"]["smooth"] = float(made.smooth.std())
                continue
            figures["choices"].setdefault(name, {})[kind] = compare(made, expected, "unipc", options.steps)
            if name in DECODERS:
                figures["smooth"][name] = psnr(made.smooth, expected.smooth)
            if name in (SCHEDULER, COMPUTE):
                figures["steps"].setdefault(name, {})[kind] = {
                    f"{solver}-{steps}": compare(made, expected, solver, steps)
                    for solver, steps in sorted(grid)
                }
    return figures


def decibels(value: float | None) -> str:
    return "equal" if value is None else f"{value:.1f} dB"


def cell(error: Mapping[str, Any]) -> str:
    """Returns both figures of an error as text."""
    return (
        f"{error['latents']:.1e}, {decibels(error['psnr_db'])}"
        if error["latents"]
        else "equal, " + (decibels(error["psnr_db"]))
    )


def tables(figures: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of every table."""
    variants = list(figures)

    def table(title: str, rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
        yield from (f"\n{title}\n", "| | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|")
        yield from (f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items())

    for kind in KINDS:
        std = ", ".join(f"{figures[v]['std'][kind]:.0f}" for v in variants)
        yield from table(
            f"{kind} transformer, whole path, {options.steps} steps (latents, PSNR; frames' std {std})",
            {
                name: [cell(figures[v]["choices"][name][kind]) for v in variants]
                for name in CHOICES
                if name != F32
            },
        )
    std = ", ".join(f"{figures[v]['std']['smooth']:.0f}" for v in variants)
    yield from table(
        f"VAE alone, smooth latents (PSNR; frames' std {std})",
        {
            name.replace(ALL, "both"): [decibels(figures[v]["smooth"][name]) for v in variants]
            for name in DECODERS
            if name != F32
        },
    )
    for kind in KINDS:
        rows = {
            f"{name}, {grid.replace('-', ', ')} steps": [
                cell(figures[v]["steps"][name][kind][grid]) for v in variants
            ]
            for name in figures[variants[0]]["steps"]
            for grid in figures[variants[0]]["steps"][name][kind]
        }
        yield from table(f"{kind} transformer, by steps (latents, PSNR)", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=list(HEADS), action="append", help="all of them by default")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--many", type=int, nargs="+", default=[10, 40, 100], help="of the table by steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", default="96x64")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--training", type=int, default=800, help="training steps of each transformer")
    parser.add_argument("--folder", type=Path, help="kept, and what it holds is used again")
    options = parser.parse_args()
    options.size = tuple(map(int, options.size.split("x")))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        donors: Path | None = None
        for variant in options.variant or HEADS:
            print(variant, flush=True)
            folder = (options.folder or Path(temporary)) / variant
            folder.mkdir(parents=True, exist_ok=True)
            figures[variant] = measure(variant, folder, donors, options)
            donors = folder
    for line in tables(figures, options):
        print(line)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
