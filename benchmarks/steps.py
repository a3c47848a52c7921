"""Draws what fewer steps cost: evaluations of the transformer against PSNR and score, a line for each method.

The methods are the solver's own grid (``--steps N``), Euler on it, the schedules that ``wanbuild calibrate``
has written into the artifact, the step caches of ``benchmarks/rivals.py``, and a distilled student where
there is one. PSNR is that of frames against the converged run of 100 steps; the score is the share of a
caption's facts that a judge finds (``tinywan.judge``). The captions are the yardstick's, by which nothing was
chosen or trained; the intervals are those of 90 % by Student's t, of captions.

    PYTHONPATH=training python benchmarks/steps.py ARTIFACT... [--student ARTIFACT...] [--captions 16]
        [--psnr docs/steps.png] [--score docs/steps-score.png] [--json FILE]

An artifact is one of a tiny checkpoint; the file of an earlier run's --json may stand for one. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tinywan import checkpoint
from tinywan.judge import judge
from tinywan.yardstick import captions

import wanrun
from rivals import RULES, THRESHOLDS, Past, Rule, Signals, run
from wanbuild.calibrate.curve import AXIS, Lines, Point, draw
from wanbuild.calibrate.judge import mean_of, psnr
from wanbuild.calibrate.runs import predicted_latents
from wanrun.denoising.noise import initial_noise
from wanrun.request.generation import Generation

CONVERGED = 100
STEPS = (25, 20, 15, 10, 8, 6, 4)
SIGNAL_PROMPTS = 4
"""Of the runs that TeaCache's polynomial and MagCache's ratios are taken from; their captions come last."""


@dataclass(frozen=True)
class Made:
    """A method's figures at one number of evaluations.

    Args:
        psnr: dB against the converged run.
        score: share of the facts that hold.
    """

    psnr: Point
    score: Point


Figures = dict[str, dict[str, list[Made]]]
"""By variant and method."""


class Bench:
    """Makes the videos of one artifact.

    Args:
        pipeline: the loaded artifact, with the step form of the loop.
        count: number of captions.
    """

    def __init__(self, pipeline: wanrun.Pipeline, count: int) -> None:
        self.pipeline = pipeline
        self.variant = pipeline.manifest.model.variant
        texts = [text for text, _ in captions()]
        self._texts, self._others = texts[:count], texts[-SIGNAL_PROMPTS:]
        self._converged = [self._frames(self._resolved(text, num_steps=CONVERGED)) for text in self._texts]

    def of_options(self, **options: Any) -> Made:
        """Makes every caption's video with options."""
        generations = [self._resolved(text, **options) for text in self._texts]
        first = generations[0]
        passes = len(first.table.timesteps) + sum(part.guided for part in first.ranges)
        return self._figures(passes, [self._frames(one) for one in generations])

    def of_rule(self, name: str, threshold: float, signals: Signals) -> Made:
        """Makes every caption's video with the published steps and a cache."""
        videos, asked = [], []
        for text in self._texts:
            generation = self._resolved(text)
            past = Past(generation.table.sigmas, signals.embeddings)
            latents = self._run(generation, RULES[name](threshold, signals), past)
            videos.append(self.pipeline.decode(latents)[0])
            asked.append(len(past.asked))
        return self._figures(2 * float(np.mean(asked)), videos)

    def signals(self) -> Signals:
        """Takes from a few runs what the rules are made of."""
        pasts = []
        for text in self._others:
            generation = self._resolved(text)
            embeddings = time_embeddings(self.variant, generation)
            pasts.append(Past(generation.table.sigmas, embeddings))
            self._run(generation, None, pasts[-1])
        inputs = np.abs(np.diff(embeddings, axis=0)).mean(1) / np.abs(embeddings[:-1]).mean(1)
        outputs, ratios = [], []
        for past in pasts:
            v = np.stack(past.velocities)
            axes = tuple(range(1, v.ndim))
            outputs.append(np.abs(np.diff(v, axis=0)).mean(axes) / np.abs(v[:-1]).mean(axes))
            ratios.append(np.append(1.0, [np.linalg.norm(b) / np.linalg.norm(a) for a, b in pairwise(v)]))
        polynomial = np.polyfit(inputs, np.mean(outputs, axis=0), 4)
        return Signals(embeddings, polynomial, np.mean(ratios, axis=0))

    def _run(self, generation: Generation, rule: Rule | None, past: Past) -> np.ndarray:
        def velocity(step: int, x: np.ndarray) -> np.ndarray:
            clean = predicted_latents(self.pipeline, generation, step, x)
            return (x - clean) / np.float32(generation.table.sigmas[step])

        noise = initial_noise(generation.options["seed"], self.pipeline.latents_shape)
        return run(generation.table, noise, velocity, rule, past)

    def _resolved(self, text: str, **options: Any) -> Generation:
        return self.pipeline.resolve(text, media=checkpoint.media(self.variant, text), **options)

    def _frames(self, generation: Generation) -> np.ndarray:
        return self.pipeline.run(generation).frames[0]

    def _figures(self, evaluations: float, videos: Sequence[np.ndarray]) -> Made:
        distances = [psnr(made, best) for made, best in zip(videos, self._converged, strict=True)]
        scores = [judge(made, text).score for made, text in zip(videos, self._texts, strict=True)]
        near, score = mean_of(distances), mean_of(scores)
        return Made(
            Point(evaluations, near.value, near.low, near.high),
            Point(evaluations, score.value, score.low, score.high),
        )


def time_embeddings(variant: str, generation: Generation) -> np.ndarray:
    """Computes (N, 6 D), the modulation of each step's time, from the checkpoint."""
    found = []
    for part in generation.ranges:
        (file,) = (checkpoint.FOLDER / variant / part.transformer).glob("*.safetensors")
        prefix = "condition_embedder."
        weights = {
            name.removeprefix(prefix): value.astype(np.float32)
            for name, value in load_file(file).items()
            if name.startswith(prefix)
        }

        def linear(name: str, x: np.ndarray, weights: Any = weights) -> np.ndarray:
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        half = weights["time_embedder.linear_1.weight"].shape[1] // 2
        angles = generation.table.timesteps[part.first : part.last, None] * 1e4 ** -(np.arange(half) / half)
        x = linear("time_embedder.linear_1", np.concatenate([np.cos(angles), np.sin(angles)], 1))
        found.append(linear("time_proj", _silu(linear("time_embedder.linear_2", _silu(x)))))
    return np.concatenate(found)


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def read(file: Path) -> Figures:
    """Reads the figures of an earlier run."""
    return {
        variant: {
            method: [Made(Point(**one["psnr"]), Point(**one["score"])) for one in made]
            for method, made in methods.items()
        }
        for variant, methods in json.loads(file.read_text()).items()
    }


def measure(artifact: Path, count: int) -> Figures:
    """Measures every method of an artifact, and prints each figure."""
    with wanrun.load(artifact, loop="step", embeddings="none") as pipeline:
        begun = time.monotonic()
        bench = Bench(pipeline, count)
        published = pipeline.manifest.model.defaults.num_steps
        print(f"\n{bench.variant}, {count} captions, converged after {time.monotonic() - begun:.0f} s")
        found: dict[str, list[Made]] = {}

        def note(method: str, what: object, made: Made) -> None:
            found.setdefault(method, []).append(made)
            p, s = made.psnr, made.score
            line = f"{method:24} {what!s:12} {p.evaluations:6.1f} evaluations"
            line += f"  {p.value:5.1f} dB ({p.low:.1f} to {p.high:.1f})"
            print(f"{line}  {s.value:.3f} ({s.low:.3f} to {s.high:.3f})", flush=True)

        steps = [published, *(one for one in STEPS if one < published)]
        for one in steps:
            note("--steps N", one, bench.of_options(num_steps=one))
        for name, schedule in sorted(
            pipeline.manifest.schedules.items(), key=lambda one: -one[1].evaluations
        ):
            kind = "calibrated" if schedule.measured else "not calibrated here"
            note(kind, name, bench.of_options(schedule=name))
        for one in steps[1:]:
            note("--solver euler", one, bench.of_options(num_steps=one, solver="euler"))
        signals = bench.signals()
        for name, thresholds in THRESHOLDS.items():
            for threshold in thresholds:
                note(name, threshold, bench.of_rule(name, threshold, signals))
        in_order = {
            method: sorted(made, key=lambda one: one.psnr.evaluations) for method, made in found.items()
        }
        return {bench.variant: in_order}


def student(artifact: Path, teacher: Path, count: int) -> tuple[str, Made]:
    """Measures a distilled artifact against its teacher's converged runs; returns the variant too."""
    with wanrun.load(teacher, loop="step", embeddings="none") as pipeline:
        bench = Bench(pipeline, count)
    with wanrun.load(artifact, loop="step", embeddings="none") as pipeline:
        bench.pipeline = pipeline
        made = bench.of_options()
    print(f"student of {bench.variant}: {made.psnr.value:.1f} dB, {made.score.value:.3f}", flush=True)
    return bench.variant, made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--student", nargs="*", default=[], type=Path, help="in the order of the artifacts")
    parser.add_argument("--captions", type=int, default=16)
    parser.add_argument("--psnr", type=Path)
    parser.add_argument("--score", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found: Figures = {}
    for artifact in options.artifacts:
        found |= read(artifact) if artifact.suffix == ".json" else measure(artifact, options.captions)
    for artifact, teacher in zip(options.student, options.artifacts, strict=False):
        name, made = student(artifact, teacher, options.captions)
        found[name]["four-step student"] = [made]
    for file, figure, axis in (
        (options.psnr, "psnr", AXIS),
        (options.score, "score", "score"),
    ):
        if file is not None:
            panels: dict[str, Lines] = {
                name: {method: [getattr(one, figure) for one in made] for method, made in methods.items()}
                for name, methods in found.items()
            }
            file.write_bytes(draw(panels, axis))
    if options.json is not None:
        plain = {
            name: {method: [asdict(one) for one in made] for method, made in methods.items()}
            for name, methods in found.items()
        }
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
