"""Runs the denoising loop with one expert after the other, of which not all need be on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Profile
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import SolverTable
from wanrun.denoising.state import State, final_latents, start_state
from wanrun.denoising.steps import (
    Call,
    LoopProgram,
    OnStep,
    Rule,
    full_program,
    loop_calls,
    run_calls,
    step_calls,
)
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
        draw: Callable[[Sequence[int]], np.ndarray] | None = None,
        rule: Rule | None = None,
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
            draw: gives noise of a shape, which the solver adds between steps; seed 0's where None.
            rule: names the program of each step; the full one where None.

        Returns:
            The final latents, float32 (B, C, T, h, w).

        Raises:
            ArtifactError: if a program or weights cannot be loaded.
            WanError: if the latents are not finite.
        """
        plans = [self._calls(table, steps, loop, rule or full_program(loop)) for steps in ranges]
        names = dict.fromkeys(call.program for calls in plans for call in calls)
        state: State = start_state(noise, [self._loader.programs[name] for name in names])

        draw = draw or Noise(0)

        def record(call: Call, seconds: float) -> None:
            if loop == "scan":
                timings.steps(call.last - call.first, seconds)
            else:
                timings.step(seconds)
            timings.mark_first_step()

        for index, (steps, calls) in enumerate(zip(ranges, plans, strict=True)):

            def load_behind(rest: Sequence[ExpertRange] = ranges[index + 1 :]) -> None:
                self._expect(rest)
                behind()

            def on_call(call: Call, load_behind: Callable[[], None] = load_behind) -> None:
                load_behind()
                on_step(call.last, len(table.timesteps))

            constant = self._prepare(embeddings, conditions, steps, timings)
            programs = self._programs(calls, steps.transformer)
            if len(calls) == 1:
                load_behind()  # no later call of this expert could hide it
            with timings.phase("denoise"):
                state = run_calls(programs, calls, state, constant, draw, record, on_call)
            del constant, programs  # the next expert has its own
        return conditions.finish(final_latents(state))

    def _calls(self, table: SolverTable, steps: ExpertRange, loop: str, rule: Rule) -> list[Call]:
        """The calls for an expert's steps."""
        if loop == "scan":
            return list(loop_calls(table, steps, rule, self._profile.options.max_steps))
        return list(step_calls(table, steps, rule))

    def _programs(self, calls: Sequence[Call], expert: str) -> dict[str, LoopProgram]:
        """The programs of these calls by name, with an expert's weights."""
        return {name: self._bound(name, expert) for name in dict.fromkeys(call.program for call in calls)}

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
        takes_weights = "transformer" in self._loader.programs[program].inputs
        return self._loader.bound(program, **{"transformer": expert} if takes_weights else {})

    def _expect(self, ranges: Sequence[ExpertRange]) -> None:
        """Starts to read the experts of ranges to come, as far as there is room."""
        names = [steps.transformer for steps in ranges]
        if self._placement == "both":
            self._loader.request(components=names)
        elif self._placement == "host":
            self._loader.prefetch(names)
