"""Noise: its bits, its distribution and the functions that it is computed with."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from wanrun.denoising import noise
from wanrun.denoising.noise import initial_noise
from wanrun.errors import UsageError


def test_the_bits_are_the_same_everywhere() -> None:
    """Only IEEE-exact operations are used, so that this digest holds on any machine."""
    data = initial_noise(2024, (3, 1000)).astype("<f4").tobytes() + initial_noise(5, (9,)).tobytes()
    assert (
        hashlib.sha256(data).hexdigest() == "244df6368d2a4b5263e0b835b4b1275c09ebd8a11afa4ae7f98d6e1638ce67f7"
    )


def test_is_standard_normal_and_depends_on_the_seed() -> None:
    a, b = initial_noise(3, (200_000,)), initial_noise(4, (200_000,))
    # Standard errors: 2.2e-3 of the mean and of the correlation, 1.6e-3 of the deviation; five of them.
    assert abs(a.mean()) < 0.011
    assert abs(a.std() - 1) < 0.008
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.011


def test_empty() -> None:
    assert initial_noise(1, (2, 0, 3)).shape == (2, 0, 3)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refuses_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(UsageError, match=rf"expected 0 to 2\*\*64 - 1; found {seed}"):
        initial_noise(seed, (4,))


def test_elementary_functions() -> None:
    random = np.random.default_rng(0)
    uniform = np.concatenate([1 - random.integers(0, 2**24, 100_000) * 2.0**-24, [1.0, 2.0**-53, 0.5]])
    # 1.8e-15 is the spacing of float64 between 8 and 16; logarithms reach 17 (24 bits) and 37 (53 bits).
    np.testing.assert_allclose(noise._log(uniform), np.log(uniform), rtol=4e-16, atol=4e-16)
    angle = np.concatenate([random.uniform(0, 2 * math.pi, 100_000), np.arange(9) * math.pi / 4])
    sine, cosine = noise._sin_cos(angle)
    np.testing.assert_allclose(sine, np.sin(angle), rtol=0, atol=1e-15)
    np.testing.assert_allclose(cosine, np.cos(angle), rtol=0, atol=1e-15)
