"""Runs the denoising loop with one expert after the other, of which not all need be on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Profile
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import SolverTable
from wanrun.denoising.steps import (
    LOOP_PROGRAMS,
    Call,
    OnStep,
    State,
    final_latents,
    loop_call,
    run_calls,
    start_state,
    step_calls,
)
from wanrun.loading.buffers import DTYPES
from wanrun.loading.weights import Loader
from wanrun.timing import Timings


def _nothing(*_: Any) -> None:
    pass


class ExpertLoop:
    """Takes noise to latents.

    Args:
        loader: brings weights and programs to the device.
        profile: the chosen profile.
        names: the transformers' components, the high-noise one first.
        placement: where experts are kept. ``both``: on the device; ``host``: one is there and the other in
            host memory; ``one``: the other is read again when its turn comes.
    """

    def __init__(self, loader: Loader, profile: Profile, names: Sequence[str], placement: str) -> None:
        self._loader, self._profile = loader, profile
        self._names, self._placement = tuple(names), placement
        self._dtype = DTYPES[profile.options["scheduler_dtype"]]

    def __call__(
        self,
        noise: np.ndarray,
        table: SolverTable,
        ranges: Sequence[ExpertRange],
        embeddings: np.ndarray,
        conditions: Conditions,
        loop: str,
        timings: Timings,
        behind: Callable[[], None] = _nothing,
        on_step: OnStep = _nothing,
    ) -> np.ndarray:
        """Runs the experts' ranges in order.

        Args:
            noise: initial latents, float32 (B, C, T, h, w); only read.
            table: timesteps and coefficients.
            ranges: which expert takes which steps.
            embeddings: (P, 512, text_dim), the positive prompt first.
            conditions: what images and videos give.
            loop: 'step' or 'scan'.
            timings: where steps are recorded.
            behind: called when what comes after the steps can be loaded behind them; more than once.
            on_step: told after each call how many of how many steps are done.

        Returns:
            The final latents, float32 (B, C, T, h, w).

        Raises:
            ArtifactError: if a program or weights cannot be loaded.
            WanError: if the latents are not finite.
        """
        state: State = start_state(noise, self._dtype)
        for index, steps in enumerate(ranges):

            def load_behind(rest: Sequence[ExpertRange] = ranges[index + 1 :]) -> None:
                self._expect(rest)
                behind()

            constant = self._prepare(embeddings, conditions, steps, timings)
            state = self._run(state, constant, table, steps, loop, timings, load_behind, on_step)
            del constant  # the next expert has its own
        return conditions.finish(final_latents(state))

    def _run(
        self,
        state: State,
        constant: Mapping[str, Any],
        table: SolverTable,
        steps: ExpertRange,
        loop: str,
        timings: Timings,
        load_behind: Callable[[], None],
        on_step: OnStep,
    ) -> State:
        """Takes an expert's steps. When it returns, nothing here holds the expert's weights."""
        program = self._bound(LOOP_PROGRAMS[loop], steps.transformer)
        calls: Iterable[Call] = step_calls(table, steps)
        if loop == "scan":
            calls = [loop_call(table, steps, self._profile.options["max_steps"])]
        if loop == "scan" or steps.last - steps.first == 1:
            load_behind()  # no later call of this expert could hide it

        def record(call: Call, seconds: float) -> None:
            if loop == "scan":
                timings.steps(call.last - call.first, seconds)
            else:
                timings.step(seconds)
            timings.mark_first_step()

        def on_call(call: Call) -> None:
            load_behind()
            on_step(call.last, len(table.timesteps))

        with timings.phase("denoise"):
            return run_calls(program, calls, state, constant, record, on_call)

    def _prepare(
        self, embeddings: np.ndarray, conditions: Conditions, steps: ExpertRange, timings: Timings
    ) -> dict[str, Any]:
        """What every step of an expert takes."""
        prepare = self._bound("prepare", steps.transformer)
        with timings.phase("prepare"):
            constant = {**prepare(embeddings=embeddings, **conditions.prepare), **conditions.steps}
        if self._profile.guidance:
            constant["guidance_scale"] = np.float32(steps.guidance_scale)
        return constant

    def _bound(self, program: str, expert: str) -> Callable[..., Mapping[str, Any]]:
        """A program with an expert's weights; where there is room for one, the other is let go first."""
        if self._placement != "both":
            for other in self._names:
                if other != expert:
                    self._loader.release(other)
        return self._loader.bound(program, transformer=expert)

    def _expect(self, ranges: Sequence[ExpertRange]) -> None:
        """Starts to read the experts of ranges to come, as far as there is room."""
        names = [steps.transformer for steps in ranges]
        if self._placement == "both":
            self._loader.request(components=names)
        elif self._placement == "host":
            self._loader.prefetch(names)
