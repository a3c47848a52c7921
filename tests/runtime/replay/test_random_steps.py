"""Drawn steps: the same ones for the same inputs, of which each decides the result."""

from __future__ import annotations

import types
from typing import Any, cast

import numpy as np
import pytest

from helpers.manifests import plain_manifest
from helpers.small_loop import MAX_STEPS, SHAPE, small_programs
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import initial_noise
from wanrun.generation.sampler import Sampler
from wanrun.replay.random_steps import DrawnSteps, LoopStart, drawn, velocities


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    facts = {"width": 40, "height": 32, "num_frames": 9, "num_videos": 1, "num_references": 0}
    built = types.SimpleNamespace(max_steps=MAX_STEPS, dtype="float32", guiders=())
    profile: Any = types.SimpleNamespace(**facts, guidance=False, num_prompts=1, options=built)
    programs: Any = small_programs(max_steps=MAX_STEPS)
    return Sampler(programs, plain_manifest(), profile, cast(Any, None))


START = LoopStart(("transformer", "transformer_2"), np.empty(0), Conditions(), initial_noise(0, SHAPE))


def test_a_velocity_is_the_same_in_each_form(sampler: Sampler) -> None:
    """Of a step alone, and of the first of two in one call; each expert has its own."""
    step, scan = (velocities(sampler, START, form, form, 1.0) for form in ("step", "scan"))  # type: ignore[arg-type]
    assert step.shape == (2, *SHAPE) and np.allclose(step, scan, atol=1e-5)
    assert not np.allclose(step[0], step[1])


def test_no_coefficient_is_small(sampler: Sampler) -> None:
    steps = [DrawnSteps.drawn(sampler, START, "scan", "scan", "transformer") for _ in range(2)]
    assert all(np.array_equal(one.rows, steps[0].rows) for one in steps)
    assert len(steps[0].rows) == 2 and np.abs(steps[0].rows).min() >= 0.25


def test_scalars_turn_parts_of_a_program_on() -> None:
    avals = {"image": "uint8[2,3]", "later": "int32[]", "kv": {"k": "bfloat16[4]"}, "bits": "uint16[4]"}
    off, on = (drawn(avals, number) for number in (0, 1))
    assert (off["later"], on["later"]) == (0, 1) and off["image"].max() > 1
    assert on["kv"]["k"].dtype == "bfloat16" and on["kv"]["k"].all()
    assert np.array_equal(on["bits"], drawn("bfloat16[4]", 1).view(np.uint16))
