"""The record of a schedule: steps that were chosen for a model, and how near to its best video they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from wanrun.artifact.model import MAX_STEPS, Number, Positive, SolverName
from wanrun.artifact.record import Record


class Schedule(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Steps that were chosen for a model, and the options that they were chosen for.

    Attributes:
        solver: name of the solver.
        timesteps: decreasing, one for each step.
        guidance_scale: at most 1 is no guidance; with two experts, that of the high-noise one.
        guidance_scale_2: of the low-noise expert; None with one transformer, as the boundary is.
        boundary: share of the training timesteps below which the low-noise expert runs.
        coefficients: of each step, fitted to the model: a, b_0, b_1 and b_2 of x' = a x + b_0 m0 + b_1 m1 +
            b_2 m2, where m0, m1 and m2 are the last predictions of the clean latents; None for the solver's.
        measured: figures of its distance to a converged run; empty if it was not measured on this model.
    """

    solver: SolverName
    timesteps: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_STEPS)]
    guidance_scale: Number
    guidance_scale_2: Number | None = None
    boundary: Annotated[float, Meta(ge=0, le=1)] | None = None
    coefficients: tuple[tuple[Number, Number, Number, Number], ...] | None = None
    measured: Mapping[str, Number | str] = {}

    def __post_init__(self) -> None:
        if self.coefficients is not None and len(self.coefficients) != len(self.timesteps):
            raise ValueError("expected coefficients for each of the timesteps")

    @property
    def evaluations(self) -> int:
        """Calls of the transformers, of which a step with guidance takes two."""
        return len(self.timesteps) * (2 if self.guidance_scale > 1 else 1)

    def describe(self) -> str:
        """Says what it takes and loses, in a line."""
        figures = self.measured
        near = f"{figures['psnr']} dB from converged videos" if "psnr" in figures else "not calibrated here"
        own = f", the solver's own {figures['plain_psnr']}" if "plain_psnr" in figures else ""
        kind = self.solver if self.coefficients is None else "fitted"
        return f"{len(self.timesteps)} {kind} steps, {self.evaluations} evaluations, {near}{own}"
