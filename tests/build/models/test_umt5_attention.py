"""The text encoder's attention by groups of heads, on a CPU, and of all heads at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.umt5 import SCORES_BYTES, _attention, relative_position_buckets

P, N, K = 1, 12, 16


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("widened", [False, True])
def test_groups_of_heads(tokens: int, widened: bool) -> None:
    rng = np.random.default_rng(tokens)
    q, k, v = (jnp.asarray(rng.standard_normal((P, tokens, N, K)), jnp.float32) for _ in range(3))
    table = jnp.asarray(rng.standard_normal((32, N)), jnp.float32)
    by_distance = relative_position_buckets(tokens, 32, 128)
    positions = np.arange(tokens)
    buckets = jnp.asarray(by_distance[positions[None] - positions[:, None] + tokens - 1])
    mask = jnp.arange(tokens)[None] < tokens - 5
    texts, results = [], []
    for forms in (TraceOptions(cpu=True, widened=widened), TraceOptions(cpu=False)):
        with tracing_with(forms):
            lowered = jax.jit(lambda *a: _attention(*a)).lower(q, k, v, table, buckets, mask)
        texts.append(lowered.as_text())
        results.append(np.asarray(lowered.compile()(q, k, v, table, buckets, mask)))
    in_groups = 4 * P * N * tokens**2 > SCORES_BYTES
    assert ["while" in text for text in texts] == [in_groups, False]
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-6 * np.abs(results[1]).max())
