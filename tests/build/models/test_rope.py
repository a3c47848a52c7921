"""Rotation in halves, of both forms, is the rotation of neighbours whose rows are reordered."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from helpers.naive import order_of_halves
from wanbuild.models.rope import apply_rope
from wanbuild.models.tracing import TraceOptions, tracing_with


@pytest.mark.parametrize("cpu", [True, False])
def test_halves_are_neighbours(cpu: bool) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 5, 3, 12)).astype(np.float32)
    angles = rng.uniform(0, 6, (5, 6)).astype(np.float32)
    pairs = x.astype(np.float64).reshape(2, 5, 3, 6, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles.astype(np.float64))[:, None]
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    order = order_of_halves(12, 12)
    with tracing_with(TraceOptions(cpu=cpu)):
        found = jax.jit(apply_rope)(x[..., order], np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(found, expected[..., order], atol=1e-6)
