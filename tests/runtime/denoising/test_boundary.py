"""The boundary between two experts, of a run that both of them have steps in."""

from __future__ import annotations

import pytest

from helpers.manifests import plain_manifest, with_model
from wanrun.artifact.parameters import Component
from wanrun.denoising.boundary import boundary_between

LIGHTNING = (1000, 937.5, 833.33, 625)
TWO = with_model(
    plain_manifest(), {"flow_shift": 5.0}, options={"guidance_scale_2": 3.0, "boundary": 0.875}
).changed(components={name: Component(name, {}) for name in ("transformer", "transformer_2")})


@pytest.mark.parametrize(
    ("own", "steps", "expected"), [(0.875, 4, 0.875), (0.875, 1, 0.875), (0.1, 4, 0.885), (0.1, 2, 0.916)]
)
def test_a_boundary_for_a_short_run(own: float, steps: int, expected: float) -> None:
    """The model's own if both experts take steps, else the middle: of 999, 937, 833, 625 or of 999, 833.

    The model's default timesteps are for another number of steps.
    """
    plain = with_model(TWO, options={**TWO.model.options, "boundary": own})
    for manifest in (plain, with_model(plain, {"timesteps": LIGHTNING})):
        assert boundary_between(manifest, steps) == pytest.approx(expected)


def test_a_boundary_for_another_solver() -> None:
    """Of 1000, 667, 334, 1: the boundary between the two in the middle."""
    manifest = with_model(TWO, options={**TWO.model.options, "boundary": 0.0})
    assert boundary_between(manifest, 4, solver="lcm", flow_shift=1.0) == pytest.approx(0.5005)
