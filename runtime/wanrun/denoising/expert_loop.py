"""Runs the denoising loop, one expert after the other; not all experts need to be on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.programs import Profile
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
from wanrun.timing.timings import Timings
from wanrun.weights.futures import unfinished
from wanrun.weights.programs import Programs


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Denoising:
    """One generation's parameters of the denoising loop, shared by all of its windows.

    Attributes:
        table: timesteps and coefficients.
        ranges: the steps of each expert.
        embeddings: (P, 512, text_dim), the positive prompt first.
        loop: 'step' or 'scan'.
        timings: where steps are recorded.
        behind: called, more than once, when the next stage may start to load during the steps.
        on_step: called after each program call with the number of steps done and the total.
        draw: returns noise of a shape, which the solver adds between steps; None: noise of seed 0.
        rule: names the program of each step; None: the full program.
    """

    table: SolverTable
    ranges: Sequence[ExpertRange]
    embeddings: np.ndarray
    loop: str
    timings: Timings
    behind: Callable[[], None] = _nothing
    on_step: OnStep = _nothing
    draw: Callable[[Sequence[int]], np.ndarray] | None = None
    rule: Rule | None = None


class ExpertLoop:
    """Denoises noise to latents.

    Args:
        programs: the profile's programs, with their weights.
        profile: the profile.
        names: the transformer components, the high-noise one first.
        placement: where experts are kept. ``both``: on the device; ``host``: one on the device and the other
            in host memory; ``one``: one on the device, the other is read again at the boundary.
    """

    def __init__(
        self,
        programs: Programs,
        profile: Profile,
        names: Sequence[str],
        placement: str,
    ) -> None:
        self._programs, self._profile = programs, profile
        self._names, self._placement = tuple(names), placement

    def __call__(self, run: Denoising, noise: np.ndarray, conditions: Conditions) -> np.ndarray:
        """Runs the experts' ranges in order.

        Args:
            run: the generation's parameters.
            noise: initial latents, float32 (B, C, T, h, w); only read.
            conditions: inputs from images and videos.

        Returns:
            The final latents, float32 (B, C, T, h, w).

        Raises:
            ArtifactError: if a program or weights cannot be loaded.
            WanError: if the latents are not finite.
        """
        plans = [self._calls(run, steps) for steps in run.ranges]
        names = dict.fromkeys(call.program for calls in plans for call in calls)
        state: State = start_state(noise, [self._programs[name] for name in names])
        for index, (steps, calls) in enumerate(zip(run.ranges, plans, strict=True)):

            def load_behind(rest: Sequence[ExpertRange] = run.ranges[index + 1 :]) -> None:
                unfinished(self._expect(rest))  # a failed load ends the run now
                run.behind()

            constant = self._prepare(run, conditions, steps)
            state = self._run(run, state, constant, steps, calls, load_behind)
            del constant  # each expert has its own
        return conditions.finish(final_latents(state))

    def _run(
        self,
        run: Denoising,
        state: State,
        constant: Mapping[str, Any],
        steps: ExpertRange,
        calls: Sequence[Call],
        load_behind: Callable[[], None],
    ) -> State:
        """Runs one expert's steps. After it returns, nothing here refers to the expert's weights."""
        timings = run.timings
        programs = self._bound_programs(calls, steps.transformer)
        if len(calls) == 1:
            load_behind()  # this expert has no later call to hide the loading

        def record(call: Call, seconds: float) -> None:
            if run.loop == "scan":
                timings.steps(call.last - call.first, seconds)
            else:
                timings.step(seconds)
            timings.mark_first_step()

        def on_call(call: Call) -> None:
            load_behind()
            run.on_step(call.last, len(run.table.timesteps))

        with timings.phase("denoise"):
            return run_calls(programs, calls, state, constant, run.draw or Noise(0), record, on_call)

    def _calls(self, run: Denoising, steps: ExpertRange) -> list[Call]:
        """Returns the program calls of an expert's steps."""
        rule = run.rule or full_program(self._programs.with_role(run.loop)[0])
        if run.loop == "scan":
            return list(loop_calls(run.table, steps, rule, self._profile.options.max_steps))
        return list(step_calls(run.table, steps, rule))

    def _bound_programs(self, calls: Sequence[Call], expert: str) -> dict[str, LoopProgram]:
        """Returns the programs of these calls by name, bound to an expert's weights."""
        return {name: self._bound(name, expert) for name in dict.fromkeys(call.program for call in calls)}

    def _prepare(self, run: Denoising, conditions: Conditions, steps: ExpertRange) -> dict[str, Any]:
        """Returns the inputs that every step of an expert takes."""
        import jax

        programs = [self._bound(name, steps.transformer) for name in self._programs.with_role("prepare")]
        given = {"embeddings": run.embeddings, **conditions.prepare}
        constant: dict[str, Any] = {}
        with run.timings.phase("prepare"):
            for program in programs:
                constant |= program(**{**given, **constant})
            # Otherwise its seconds, 1 for a 1.3B model on two cores, would be those of the first step.
            jax.block_until_ready(constant)
        constant |= conditions.steps
        if self._profile.guidance:
            constant["guidance_scale"] = np.float32(steps.guidance_scale)
        return constant

    def _bound(self, program: str, expert: str) -> Callable[..., Mapping[str, Any]]:
        """Binds a program to an expert's weights; if only one expert fits, releases the other first."""
        if self._placement != "both":
            for other in self._names:
                if other != expert:
                    self._programs.release(other)
        takes_weights = "transformer" in self._programs[program].inputs
        return self._programs.bound(program, **{"transformer": expert} if takes_weights else {})

    def _expect(self, ranges: Sequence[ExpertRange]) -> list[Future[Any]]:
        """Starts to load the experts of later ranges, as far as they fit."""
        names = [steps.transformer for steps in ranges]
        if self._placement == "both":
            return self._programs.request(components=names)
        return self._programs.prefetch(names) if self._placement == "host" else []
