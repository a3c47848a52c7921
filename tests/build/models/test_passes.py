"""The TPU's kernels around the attention do what the plain passes do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.passes import Passes, Unrotated
from wanbuild.models.tpu_passes import TpuPasses

pytestmark = pytest.mark.slow

PLAIN, TPU = Passes(), TpuPasses(interpret=True)


def array(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "parts"),
    [(700, 3, 128, 1), (37, 12, 128, 2), (20, 18, 128, 2), (9, 4, 32, 2)],
    ids=["two blocks", "parts", "two blocks of a part's heads", "other heads"],
)
def test_norm_and_rotation(tokens: int, heads: int, width: int, parts: int) -> None:
    x = Unrotated(array(0, 2, tokens, heads * width), array(1, 2, tokens, 1), array(2, heads * width))
    arguments: tuple[Any, ...] = (array(3, tokens, width // 2), array(4, tokens, width // 2), 0.3)
    found, plain = (one.rotate(x, *arguments, jnp.float32, parts) for one in (TPU, PLAIN))
    assert found.shape == (parts, 2, tokens, heads // parts, width)
    np.testing.assert_allclose(found, plain, rtol=2e-6, atol=2e-6)
    rounded = Unrotated(x.values.astype(jnp.bfloat16), x.inverse, x.weight)
    found, plain = (one.rotate(rounded, *arguments, jnp.bfloat16, parts) for one in (TPU, PLAIN))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), plain.astype(jnp.float32), rtol=8e-3, atol=1e-6)


def test_parts() -> None:
    x = array(0, 2, 530, 4, 128)
    parts = TPU.by_part(x, 2)
    np.testing.assert_array_equal(parts, np.asarray(x).reshape(2, 530, 2, 2, 128).transpose(2, 0, 1, 3, 4))
    np.testing.assert_array_equal(TPU.joined(parts), x)
    np.testing.assert_array_equal(PLAIN.joined(PLAIN.by_part(x, 2)), x)
