"""Which steps have guidance, and which have a third pass."""

from __future__ import annotations

import pytest

from wanrun.artifact.guiders import GUIDERS
from wanrun.denoising.guided_steps import guided_steps, skipping_steps
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import expert_ranges, step_calls

SKIPPING = {**GUIDERS["skip-layer"].options, "skip_layers": [1]}


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (50, {}, range(1, 10)),
        (30, {}, range(1, 6)),
        (4, {}, range(0)),
        (10, {"skip_start": 0.0, "skip_end": 1.0}, range(1, 10)),
        (10, {"skip_start": 0.29, "skip_end": 0.55}, range(3, 5)),
    ],
)
def test_the_steps_of_a_third_pass(total: int, shares: dict[str, float], expected: range) -> None:
    """Those for which diffusers' guider says int(start · total) < step < int(stop · total)."""
    assert list(skipping_steps({**SKIPPING, **shares}, total)) == list(expected)
    assert not skipping_steps({"guider": "cfg-zero", "zero_steps": 1}, total)


def test_a_step_without_guidance_has_no_third_pass() -> None:
    """Of two experts, each with its own steps; rows of a step say which layers."""
    options = {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary": 0.875, "guidance_start": 0.2}
    options |= {"guider": "skip-layer", **SKIPPING, "skip_end": 0.8}
    table = solver_table("unipc", 10, 5.0)
    first, second = expert_ranges(table, ("transformer", "transformer_2"), options, 1000)
    assert guided_steps(options, 10) == (2, 10)
    assert [*first.skip_scales, *second.skip_scales] == [0, 0, *[2.8] * 6, 0, 0]
    assert first.skipping + second.skipping == 6 and first.skip_layers == second.skip_layers == (1,)
    shapes = {"guidance_projection": (), "skip_scale": (), "skip_layers": (3,)}
    third = list(step_calls(table, first, True, shapes))[2].arguments
    assert third["skip_layers"].tolist() == [0, 1, 0] and third["skip_scale"].tolist() == pytest.approx(2.8)
    assert third["guidance_projection"] == 0
