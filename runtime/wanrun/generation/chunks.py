"""A video that is made chunk by chunk: each one attends to those before it, of which a cache is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from wanrun.artifact.model import Chunking
from wanrun.artifact.roles import RoleName
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.pyramid import enlarged, halved
from wanrun.denoising.solvers import StageStart
from wanrun.denoising.state import State, final_latents, start_state
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.errors import OtherReleaseError
from wanrun.weights.bound_programs import Programs

Draw = Callable[[Sequence[int]], np.ndarray]
"""Returns noise of a shape."""

BEGIN: RoleName = "begin"
"""The role of the program that makes what is kept before the first chunk."""

REMEMBER: RoleName = "remember"
"""The role of the program that keeps a finished chunk."""


class StepMaker(Protocol):
    """A maker of the steps of a chunk, such as ``Sampler``."""

    programs: Programs

    @property
    def chunks(self) -> Chunking: ...

    def prepare(self, run: Denoising, conditions: Conditions, steps: ExpertRange) -> dict[str, Any]: ...

    def maker(self, role: RoleName, shape: Sequence[int] = ()) -> str: ...

    def expert_steps(
        self,
        run: Denoising,
        steps: ExpertRange,
        state: State,
        constant: Mapping[str, Any],
        draw: Draw,
        later: Sequence[str],
    ) -> State: ...


class ChunkNoise:
    """The initial noise of a video's chunks, in order: the given noise, then what ``draw`` returns.

    ``noise`` is that of the first chunks, float32 (1, C, T, h, w), or None; too little for a chunk is unused.
    ``shape`` is (1, C, T, h, w) of a chunk, with any T.
    """

    def __init__(self, noise: np.ndarray | None, shape: Sequence[int], draw: Draw) -> None:
        self._noise, self._shape, self._draw = noise, tuple(shape), draw

    def __call__(self, length: int) -> np.ndarray:
        """Returns that of the next chunk, float32 (1, C, length, h, w)."""
        if self._noise is not None and self._noise.shape[2] >= length:
            own, self._noise = np.split(self._noise, [length], axis=2)
            return own
        self._noise = None
        return self._draw((*self._shape[:2], length, *self._shape[3:]))


class ChunkLoop:
    """Makes the chunks of one video, one for each call.

    A chunk is kept when the next one is asked for, by the prompt that it was made by. So the last one is not
    kept, and the frames of each wait only for its own steps. ``draw`` is the noise of the video, of which a
    given video takes the first. The constructor raises OtherReleaseError for programs of an earlier version.
    """

    def __init__(self, sampler: StepMaker, conditions: Conditions, draw: Noise) -> None:
        self._sampler, self._conditions, self._draw = sampler, conditions, draw
        beginners, (self._keeper,) = map(sampler.programs.with_role, (BEGIN, REMEMBER))
        if not beginners:
            raise OtherReleaseError(
                "other_release",
                f"an earlier version has compiled the artifact, without a program of role {BEGIN}",
                remedy="compile it again: wanbuild compile",
            )
        self._frames = sampler.programs[self._keeper].array("latents")[1][2]
        self._constant: dict[str, Any] = {}
        self._embeddings: np.ndarray | None = None
        self._made: np.ndarray | None = None
        self._number = self._before = 0
        self._cache: Any
        if conditions.given is None:
            self._cache = sampler.programs.bound(beginners[0])()
        else:  # it stands for a first chunk
            self._cache, self._number = {"cache": dataclasses.asdict(conditions.given.past(draw))}, 1
        pyramid = sampler.chunks.pyramid
        self._gamma = 0.0 if pyramid is None else pyramid.gamma

    def __call__(self, run: Denoising, noise: np.ndarray) -> np.ndarray:
        """Makes the next chunk: returns its latents, float32 (1, C, T, h, w), or given ones as they are.

        ``run`` may have another prompt than before. ``noise``, the initial noise of the latents, is only
        read. Raises WanError if the latents are not finite.
        """
        run = run.opened
        (steps,) = run.ranges
        if self._made is not None:
            self._keep(run, self._made)
        if self._embeddings is not run.embeddings:
            self._constant = self._sampler.prepare(run, self._conditions, steps)
            self._embeddings = run.embeddings
        held, chunks = self._conditions.held, self._sampler.chunks
        if held is not None and self._before < held.shape[1]:  # whole chunks are held
            length = chunks.each if self._number else chunks.first
            self._made = held[None, :, self._before : self._before + length]
            return self._made
        given = {**self._constant, **self._cache, "chunk": np.int32(self._number)}
        self._made = self._denoised(run, steps, noise, given)
        return self._made

    def _denoised(
        self, run: Denoising, steps: ExpertRange, noise: np.ndarray, given: Mapping[str, Any]
    ) -> np.ndarray:
        """Returns the latents of a chunk, of which each stage but the first has twice the size before."""
        starts, latents = run.table.starts or (StageStart(steps.first),), noise
        for _ in starts[1:]:
            latents = halved(latents)
        ends = [*(start.step for start in starts[1:]), steps.last]
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if index:
                latents = enlarged(latents, start, self._draw, self._gamma)
            name = self._sampler.maker(run.form.makers[0], latents.shape)
            state = start_state(latents, self._sampler.programs[name])
            part = steps.part(start.step, end)
            latents = final_latents(self._sampler.expert_steps(run, part, state, given, self._draw, ()))
        return latents

    def _keep(self, run: Denoising, latents: np.ndarray) -> None:
        """Keeps a finished chunk."""
        import jax

        (steps,) = run.ranges
        remember = self._sampler.programs.of_expert(self._keeper, steps.transformer, run.loras)
        behind = self._frames - latents.shape[2]
        filled = np.pad(latents, ((0, 0), (0, 0), (0, behind), (0, 0), (0, 0)))
        with run.timings.phase(REMEMBER):
            self._cache = remember(
                **self._constant, **self._cache, chunk=np.int32(self._number), latents=filled
            )
            jax.block_until_ready(self._cache)
        self._number += 1
        self._before += latents.shape[2]


def in_chunks(
    sampler: StepMaker,
    run: Denoising,
    noise: np.ndarray | None,
    conditions: Conditions,
    draw: Noise,
    shape: Sequence[int],
) -> np.ndarray:
    """Returns the final latents, float32 (1, C, T, h, w), of a video of this shape, made chunk by chunk.

    ``noise`` is the initial noise of the first chunks; None where each draws its own.
    """
    loop, starts = ChunkLoop(sampler, conditions, draw), ChunkNoise(noise, shape, draw)
    lengths = run.chunks or sampler.chunks.lengths(shape[2])
    given = 0 if conditions.held is None else sampler.chunks.within(conditions.held.shape[1])
    made = [
        loop(replace(run, window=max(number, 0), windows=len(lengths) - given), starts(length))
        for number, length in enumerate(lengths, -given)
    ]
    return np.concatenate(made, axis=2)
