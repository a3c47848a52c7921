"""Which expert takes which steps, against the reference's rule applied step by step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.solvers import WITH_REFERENCE
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import expert_ranges

NAMES = ("transformer", "transformer_2")


def by_the_reference(solver: str, steps: int, shift: float, boundary: float) -> list[str]:
    """The expert of each step as diffusers' loop chooses it: tensors of its schedulers' own dtype."""
    table = solver_table(solver, steps, shift)
    kind = torch.int64 if solver in ("unipc", "dpm++") else torch.float32
    timesteps = torch.from_numpy(table.timesteps).to(kind)
    return [NAMES[0] if t >= boundary * 1000 else NAMES[1] for t in timesteps]


@settings(deadline=None, max_examples=200)
@given(
    solver=st.sampled_from(WITH_REFERENCE),
    steps=st.integers(1, 60),
    shift=st.floats(1, 20),
    boundary=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.875, 0.9, 0.999, 1.0])),
)
def test_the_rule_of_the_reference(solver: str, steps: int, shift: float, boundary: float) -> None:
    table = solver_table(solver, steps, shift)
    options = {"boundary": boundary, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
    parts = expert_ranges(table, NAMES, options, 1000)
    taken = [part.transformer for part in parts for _ in range(part.first, part.last)]
    assert taken == by_the_reference(solver, steps, shift, boundary)
    assert [part.first for part in parts] == [0, *(part.last for part in parts)][:-1]
    assert parts[-1].last == steps and all(part.first < part.last for part in parts)
    scales = {NAMES[0]: 4.0, NAMES[1]: 3.0}
    assert all(set(part.guidance_scales) == {scales[part.transformer]} for part in parts)
