"""Noise: its bits, its distribution and the functions that it is computed with."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from helpers.refusals import refuses
from wanrun.denoising import noise
from wanrun.denoising.noise import initial_noise

RECORDED = (
    (42, (5,), "0.336690366 0.128809407 0.234462366 0.23033303 -1.12285638"),
    (
        2**63,
        (17,),  # one more than torch draws at once
        "-1.12583983 -1.6959312 0.566650629 0.793508351 0.598839462 -1.55509508 -0.34136039 1.85300612 "
        "0.468096405 -0.585497558 -0.173396751 0.183477938 1.38936615 1.58633423 0.946298361 -0.843676746 "
        "0.931826591",
    ),
    (
        7,
        (1, 2, 1, 2, 4),
        "-0.820134521 0.395631164 0.898908496 -1.38840389 -0.166996017 0.285149962 -0.641091526 -0.893655419 "
        "0.926542997 -0.535512209 -1.1597203 -0.460157156 0.708539069 1.01275539 0.230396867 1.09016514",
    ),
)
"""Seeds, shapes, and values of ``torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))`` of
torch 2.13. Parity compares many more."""


@pytest.mark.parametrize(("seed", "shape", "values"), RECORDED)
def test_values_of_torch(seed: int, shape: tuple[int, ...], values: str) -> None:
    got = initial_noise(seed, shape)
    assert got.shape == shape and got.dtype == np.float32
    np.testing.assert_allclose(got.ravel(), np.array(values.split(), float), rtol=0, atol=1e-6)


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
    with refuses("out_of_range", what="seed", expected="2**64 - 1", found=seed):
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
