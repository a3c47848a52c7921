"""Attention of tokens that several devices share, around the TPU's kernel: Ulysses, ring and both."""

from __future__ import annotations

from helpers.devices import on_devices

DEVICES = 4
MESHES = ({"context": 4}, {"ring": 4}, {"ring": 2, "context": 2})


def compare() -> None:
    """Runs in a process with virtual devices: 150 tokens, which do not divide, and four heads."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from wanbuild.models.attention import blocked_attention
    from wanbuild.models.partition import shared_tokens
    from wanbuild.models.sequence import TokenAttention
    from wanbuild.models.splash import SplashAttention
    from wanrun.artifact.mesh import jax_mesh

    count, heads, width = 150, 4, 16
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, count, heads, width)), jnp.float32) for _ in range(3))
    image, real = v[:1, :33], jnp.arange(33) < 30
    expected = blocked_attention(q, k, v)
    beside = blocked_attention(q, jnp.repeat(image, 2, 0), jnp.repeat(image, 2, 0), real)
    kernel = SplashAttention(128, 128, 128, interpret=True)
    for sizes in MESHES:
        mesh = jax_mesh(sizes, jax.devices())
        assert mesh is not None
        with jax.set_mesh(mesh):

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
                tokens = TokenAttention(kernel, count)
                q, k, v = (shared_tokens(x, 1) for x in (q, k, v))
                return tokens.among(q, k, v), tokens.to(q, image, image, real)

            found = jax.jit(attend)(q, k, v)
        for one, plain in zip(found, (expected, beside), strict=True):
            one = np.asarray(one)[:, :count]
            error = np.linalg.norm(one - plain) / np.linalg.norm(plain)
            assert error < 2e-6, (sizes, error)
        print("compared", *sizes)


def test_attention_of_shared_tokens() -> None:
    assert on_devices(DEVICES, compare).split("\n") == [*(" ".join(("compared", *m)) for m in MESHES), ""]
