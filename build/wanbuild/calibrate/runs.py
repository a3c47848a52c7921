"""The runs of a calibration: converged ones, which are recorded, those compared with them, and fits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from wanbuild.calibrate.fit import Steps, fit
from wanbuild.calibrate.graph import Recording, products_of
from wanbuild.calibrate.judge import psnr
from wanbuild.calibrate.memo import Memo
from wanrun.artifact.roles import STEPWISE
from wanrun.artifact.schedules import Schedule
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.steps import ExpertRange, schedule
from wanrun.errors import UsageError
from wanrun.files import canonical_json, sha256_of
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.step import Step
from wanrun.request.generation import Generation
from wanrun.request.prompts_file import Line
from wanrun.request.request import Request
from wanrun.request.resolve import resolve_request

NODES = 50
"""Nodes of a recording: every second step of a run of 100."""

VALUES = 2**16
"""The most values of latents that are recorded at a node; of larger latents every n-th value is."""


class _PredictedError(Exception):
    """Ends a run after its first step, before anything is decoded."""


class Runs:
    """Makes videos with the loaded profile of an artifact, each once.

    The profile has the step form of the loop, and runs of ``converged`` steps count as exact.
    """

    def __init__(self, pipeline: Pipeline, memo: Memo, converged: int) -> None:
        self._pipeline, self._memo, self._converged = pipeline, memo, converged
        self._train = pipeline.manifest.model.num_train_timesteps

    def resolved(self, line: Line, **options: Any) -> Generation:
        """Returns the resolved generation of a line with these options."""
        given = {name: getattr(line, name) for name in Request.__struct_fields__}
        request = Request(**{**given, "loop": STEPWISE, **options})
        pipeline = self._pipeline
        return resolve_request(request, pipeline.artifact, loaded=pipeline.profile)

    def reference(self, line: Line, steps: int | None = None) -> np.ndarray:
        """Returns frames, uint8 (B, F, H, W, 3), of the solver's own steps; None: of the converged run."""
        options = {"num_steps": steps or self._converged}
        return self._memo.array(_name(line, options), lambda: self._frames(self.resolved(line, **options)))

    def distances(self, line: Line, steps: Steps, references: Sequence[int | None] = (None,)) -> list[float]:
        """Returns the PSNR in dB of one run with these steps against each ``reference``."""
        made = functools.cache(lambda: self._frames(self._with(line, steps)))
        run = {"line": msgspec.to_builtins(line), **_told(steps)}
        return [
            self._memo.figure(
                {**run, "beside": beside}, functools.partial(self._compared, made, line, beside)
            )
            for beside in references
        ]

    def _compared(self, made: Callable[[], np.ndarray], line: Line, steps: int | None) -> float:
        return psnr(made(), self.reference(line, steps))

    def between(self, line: Line, steps: int) -> float:
        """Returns the PSNR of the run with so many of the solver's steps against the converged one."""
        run = {"line": msgspec.to_builtins(line), "own": steps}
        return self._memo.figure(run, lambda: psnr(self.reference(line, steps), self.reference(line)))

    def recorded(self, lines: Sequence[Line]) -> Recording:
        """Makes the converged runs of some lines, and returns what was recorded of all of them together."""
        products = [self._recorded(line, "products") for line in lines]
        return Recording(self._sigmas(lines[0]), np.mean(products, axis=0))

    def at(self, nodes: Sequence[int], line: Line) -> Steps:
        """Returns the solver's steps at nodes of a recording."""
        return Steps(explicit(self._sigmas(line)[list(nodes)], self._train))

    def nearest(self, steps: Steps, line: Line) -> list[int]:
        """Returns the node of a recording that is nearest to each of the steps."""
        nodes, levels = self._sigmas(line), np.array(steps.timesteps) / self._train
        return [int(np.abs(nodes - level).argmin()) for level in levels]

    def plain(self, line: Line, steps: int) -> Steps:
        """Returns the steps of the solver's own grid."""
        table = self.resolved(line, num_steps=steps).table
        return Steps(explicit(table.sigmas[:-1], self._train))

    def fitted(self, lines: Sequence[Line], nodes: Sequence[int]) -> Steps:
        """Returns steps at nodes of a recording, with coefficients that are fitted to the recorded runs."""
        steps = self.at(nodes, lines[0])
        run = {"lines": msgspec.to_builtins(lines), "nodes": [int(one) for one in nodes]}
        name = f"fitted-{sha256_of(canonical_json(run))[:32]}"
        found = self._memo.array(name, lambda: np.array(self._fit(lines, nodes, steps)))
        return replace(steps, coefficients=tuple(tuple(row) for row in found.tolist()))

    def _fit(self, lines: Sequence[Line], nodes: Sequence[int], steps: Steps) -> Any:
        generations = [self._with(line, steps) for line in lines]
        after = [*list(nodes)[1:], len(self._nodes())]

        def predict(number: int, step: int, latents: np.ndarray) -> np.ndarray:
            return predicted_latents(self._pipeline, generations[number], step, latents)

        starts = [initial_noise(line.seed, self._pipeline.latents_shape) for line in lines]
        sigmas = generations[0].table.sigmas.tolist()
        return fit(
            predict, starts, [self._recorded(line, "levels")[after] for line in lines], sigmas, _thinned
        )

    def _with(self, line: Line, steps: Steps) -> Generation:
        """Returns the resolved generation of a line with these steps."""
        generation = self.resolved(line, timesteps=steps.timesteps)
        options = {**generation.options, "coefficients": steps.coefficients}
        return replace(generation, table=schedule(options, generation.manifest)[0])

    def _sigmas(self, line: Line) -> np.ndarray:
        """Returns the noise levels of the nodes."""
        return self.resolved(line, num_steps=self._converged).table.sigmas[self._nodes()]

    def _nodes(self) -> list[int]:
        every = max(1, self._converged // NODES)
        return sorted({*range(0, self._converged, every), self._converged - 1})

    def _recorded(self, line: Line, what: str) -> np.ndarray:
        """Returns what was recorded of a line's converged run: one of the arrays of ``_record``."""
        return self._memo.array(f"{what}-{_name(line, {})}", lambda: self._record(line)[what])

    def _record(self, line: Line) -> dict[str, np.ndarray]:
        """Makes a line's converged run, keeps its frames, and returns its products and levels."""
        # products (2N + 1, 2N + 1), as of `Recording`; levels, float32 (N + 1, D): latents at the N nodes and
        # in the end.
        generation = self.resolved(line, num_steps=self._converged)
        nodes = set(self._nodes())
        entered, predicted_latents = list[np.ndarray](), list[np.ndarray]()
        at = final = np.empty(0, np.float32)

        def on_step(done: int, total: int, step: Step) -> None:
            nonlocal at, final
            latents = _thinned(step.all_latents)
            if done == 1:  # the first step is of order 1: it leaves x' = r x + (1 - r) m
                ratio = generation.table.sigmas[1] / generation.table.sigmas[0]
                at = (latents - (1 - ratio) * _thinned(step.all_clean)) / ratio
            if done - 1 in nodes:  # of a video in windows, the first one's
                entered.append(at)
                predicted_latents.append(_thinned(step.all_clean))
            if done == self._converged:
                final = latents
            at = latents

        options = {"num_steps": self._converged}
        frames = self._pipeline.run(generation, on_step=on_step).frames
        self._memo.array(_name(line, options), lambda: frames)
        recorded = {
            "products": products_of(np.stack(entered), np.stack(predicted_latents), final),
            "levels": np.stack([*entered, final]),
        }
        for what, array in recorded.items():
            self._memo.array(f"{what}-{_name(line, {})}", functools.partial(np.asarray, array))
        return recorded

    def _frames(self, generation: Generation) -> np.ndarray:
        return self._pipeline.run(generation).frames


def predicted_latents(
    pipeline: Pipeline, generation: Generation, step: int, latents: np.ndarray
) -> np.ndarray:
    """Returns the clean latents that a model predicts, float32 (B, C, T, h, w) like the latents.

    The latents are at the noise level of step number ``step``; the generation's solver adds no noise.
    """
    table, place = generation.table, slice(step, step + 1)
    part = next(one for one in generation.ranges if one.first <= step < one.last)
    alone = replace(
        generation,
        table=replace(table, timesteps=table.timesteps[place], coefficients=table.coefficients[place]),
        ranges=(ExpertRange.alike(part.transformer, 0, 1, part.guidance_scales[step - part.first]),),
    )
    found = list[np.ndarray]()

    def on_step(done: int, total: int, step: Step) -> None:
        found.append(step.all_clean)
        raise _PredictedError

    with contextlib.suppress(_PredictedError):
        pipeline.run(alone, latents=latents, on_step=on_step)
    return found[0]


def explicit(sigmas: np.ndarray, train: int) -> tuple[float, ...]:
    """Returns the timesteps of noise levels, as they are written down; 1 is the timestep of pure noise."""
    return tuple(float(train) if one > 1 - 2e-6 else round(float(one) * train, 3) for one in sigmas)


def check_calibratable(generation: Generation) -> None:
    """Raises UsageError for a model whose steps cannot be chosen.

    The generation has the artifact's defaults.
    """
    if generation.options.get("timesteps") is not None or generation.table.noise.any():
        raise UsageError(
            "unsupported",
            "this model's steps are fixed, and cannot be calibrated",
            expected="a model whose steps are those of its solver",
            found=", ".join(f"{one:g}" for one in generation.table.timesteps),
        )


def made_for(generation: Generation, steps: Steps, measured: dict[str, Any]) -> Schedule:
    """Returns the record of a schedule for the options of a generation."""
    options = generation.options
    return Schedule(
        solver=options["solver"],
        timesteps=steps.timesteps,
        coefficients=steps.coefficients,
        guidance_scale=options["guidance_scale"],
        guidance_scale_2=options.get("guidance_scale_2"),
        boundary=options.get("boundary"),
        measured=measured,
    )


def _told(steps: Steps) -> dict[str, Any]:
    return {"timesteps": steps.timesteps, "coefficients": steps.coefficients}


def _name(line: Line, options: dict[str, Any]) -> str:
    return sha256_of(canonical_json({"line": msgspec.to_builtins(line), **options}))[:32]


def _thinned(latents: np.ndarray) -> np.ndarray:
    flat = latents.ravel()
    return np.asarray(flat[:: max(1, flat.size // VALUES)], np.float32)
