"""Runs the denoising loop with one expert after the other, of which not all need be on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Profile
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.schedule import Segment
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
from wanrun.loading.futures import unfinished
from wanrun.loading.programs import Programs
from wanrun.timing import Timings


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Denoising:
    """What a generation asks of the denoising loop, the same for all of its windows.

    Attributes:
        table: timesteps and coefficients.
        segments: which expert takes which steps.
        embeddings: (P, 512, text_dim), the positive prompt first.
        loop: 'step' or 'scan'.
        timings: where steps are recorded.
        behind: called when what comes after the steps can be loaded behind them; more than once.
        on_step: told after each call how many of how many steps are done.
    """

    table: SolverTable
    segments: Sequence[Segment]
    embeddings: np.ndarray
    loop: str
    timings: Timings
    behind: Callable[[], None] = _nothing
    on_step: OnStep = _nothing


class ExpertLoop:
    """Takes noise to latents.

    Args:
        programs: the profile's, with their weights.
        profile: the profile.
        names: the transformers' components, the high-noise one first.
        placement: where experts are kept. ``both``: on the device; ``host``: one is there and the other in
            host memory; ``one``: the other is read again when its turn comes.
    """

    def __init__(self, programs: Programs, profile: Profile, names: Sequence[str], placement: str) -> None:
        self._programs, self._profile = programs, profile
        self._names, self._placement = tuple(names), placement
        self._dtype = DTYPES[profile.options["scheduler_dtype"]]

    def __call__(self, run: Denoising, noise: np.ndarray, conditions: Conditions) -> np.ndarray:
        """Runs the segments in order.

        Args:
            run: what to do.
            noise: initial latents, float32 (B, C, T, h, w); only read.
            conditions: what images and videos give.

        Returns:
            The final latents, float32 (B, C, T, h, w).

        Raises:
            ArtifactError: if a program or weights cannot be loaded.
            WanError: if the latents are not finite.
        """
        state: State = start_state(noise, self._dtype)
        for index, segment in enumerate(run.segments):

            def load_behind(rest: Sequence[Segment] = run.segments[index + 1 :]) -> None:
                unfinished(self._expect(rest))  # a failure ends the run now
                run.behind()

            constant = self._prepare(run, conditions, segment)
            state = self._run(run, state, constant, segment, load_behind)
            del constant  # the next expert has its own
        return conditions.finish(final_latents(state))

    def _run(
        self,
        run: Denoising,
        state: State,
        constant: Mapping[str, Any],
        segment: Segment,
        load_behind: Callable[[], None],
    ) -> State:
        """Takes a segment's steps. When it returns, nothing here holds the expert's weights."""
        scan, timings = run.loop == "scan", run.timings
        program = self._bound(LOOP_PROGRAMS[run.loop], segment.transformer)
        calls: Iterable[Call] = step_calls(run.table, segment)
        if scan:
            calls = [loop_call(run.table, segment, self._profile.options["max_steps"])]
        if scan or segment.last - segment.first == 1:
            load_behind()  # no later call of this segment could hide it

        def record(call: Call, seconds: float) -> None:
            if scan:
                timings.steps(call.last - call.first, seconds)
            else:
                timings.step(seconds)
            timings.mark_first_step()

        def on_call(call: Call) -> None:
            load_behind()
            run.on_step(call.last, len(run.table.timesteps))

        with timings.phase("denoise"):
            return run_calls(program, calls, state, constant, record, on_call)

    def _prepare(self, run: Denoising, conditions: Conditions, segment: Segment) -> dict[str, Any]:
        """What every step of a segment takes."""
        prepare = self._bound("prepare", segment.transformer)
        with run.timings.phase("prepare"):
            constant = {
                **prepare(embeddings=run.embeddings, **conditions.prepare),
                **conditions.steps,
            }
        if self._profile.guidance:
            constant["guidance_scale"] = np.float32(segment.guidance_scale)
        return constant

    def _bound(self, program: str, expert: str) -> Callable[..., Mapping[str, Any]]:
        """A program with an expert's weights; where there is room for one, the other is let go first."""
        if self._placement != "both":
            for other in self._names:
                if other != expert:
                    self._programs.release(other)
        return self._programs.bound(program, transformer=expert)

    def _expect(self, segments: Sequence[Segment]) -> list[Future[Any]]:
        """Starts to read the experts of segments to come, as far as there is room."""
        names = [segment.transformer for segment in segments]
        if self._placement == "both":
            return self._programs.request(components=names)
        return self._programs.prefetch(names) if self._placement == "host" else []
