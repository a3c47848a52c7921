"""Attention of tokens that several devices share, around the TPU's kernel: Ulysses, ring and both."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers.devices import on_devices

DEVICES = 4
MESHES = ({"context": 4}, {"ring": 4}, {"ring": 2, "context": 2})


def compare() -> None:
    """Runs in a process with virtual devices: 150 tokens, which do not divide, and four heads."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from wanbuild.models.attention import blocked_attention
    from wanbuild.models.flash import FlashAttention
    from wanbuild.models.partition import shared_tokens
    from wanbuild.models.passes import Unrotated
    from wanbuild.models.sequence import TokenAttention
    from wanrun.artifact.mesh import jax_mesh

    count, heads, width = 150, 4, 128
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def attend(kernel: Any, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
        tokens = TokenAttention(kernel, count)
        q, k = (Unrotated(shared_tokens(x.values, 1), shared_tokens(x.inverse, 1), x.weight) for x in (q, k))
        v, cos, sin = shared_tokens(v, 1), shared_tokens(cos, 0), shared_tokens(sin, 0)
        image, real = v[:1, :33], jnp.arange(33) < 30
        return tokens.among(q, k, v, cos, sin), tokens.to(tokens.scaled(v, v.dtype), image, image, real)

    q, k = (
        Unrotated(array(2, count, heads * width), array(2, count, 1), array(heads * width)) for _ in range(2)
    )
    given = q, k, array(2, count, heads, width), array(count, width // 2), array(count, width // 2)
    expected = attend(blocked_attention, *given)
    kernel = FlashAttention(64, 16, 32, interpret=True)
    for sizes in MESHES:
        mesh = jax_mesh(sizes, jax.devices())
        assert mesh is not None
        with jax.set_mesh(mesh):
            found = jax.jit(functools.partial(attend, kernel))(*given)
        for one, plain in zip(found, expected, strict=True):
            one = np.asarray(one)[:, :count]
            error = np.linalg.norm(one - plain) / np.linalg.norm(plain)
            assert error < 2e-6, (sizes, error)
        print("compared", *sizes)


@pytest.mark.thorough
def test_attention_of_shared_tokens() -> None:
    assert on_devices(DEVICES, compare).split("\n") == [*(" ".join(("compared", *m)) for m in MESHES), ""]
