"""A VAE whose pieces are all alike against one whose first frame is a piece of its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compiling import fast_jit
from wanbuild.models.params import abstract_params, bind
from wanbuild.models.vae import WanVAE
from wanbuild.models.vae_config import VAEConfig

pytestmark = pytest.mark.slow

SMALL = {"base_dim": 4, "z_dim": 4, "dim_mult": (1, 2, 4, 4), "num_res_blocks": 1}
SMALL |= {"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
FORMS = {
    "2.1": SMALL,
    "2.2": SMALL
    | {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
    | {"scale_factor_spatial": 16, "decoder_base_dim": 4},
}
TOLERANCE = 1e-5
"""Float32 noise of sums in another order, relative to the largest value."""


@functools.cache
def vae(form: str) -> tuple[WanVAE, Any]:
    """The abstract model and random weights, biases and norms too, so that junk in front would be seen."""
    model = WanVAE(VAEConfig(**FORMS[form]))
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fan_in = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 1
        values = random.standard_normal(leaf.shape) / fan_in**0.5
        return jnp.asarray(values if len(leaf.shape) > 1 else 0.5 + 0.3 * values, leaf.dtype)

    return model, jax.tree.map(draw, abstract_params(model))


def agree(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        assert np.std(y) > 1e-3
        assert np.max(np.abs(x - y)) <= TOLERANCE * np.max(np.abs(y))


def drawn(frames: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, frames, 2, 3)), jnp.float32)


@functools.cache
def decoded(form: str, frames: int, chunk: int, keep: int, alike: bool) -> Any:
    model, weights = vae(form)

    def decode(weights: Any, latents: jax.Array) -> Any:
        return bind(model, weights).decode(latents, chunk, keep_last=keep, alike=alike)

    return fast_jit(decode)(weights, drawn(frames))


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "frames", "chunk", "keep"), [("2.1", 3, 1, 5), ("2.2", 4, 2, 0)])
def test_decode(form: str, frames: int, chunk: int, keep: int) -> None:
    agree(*(decoded(form, frames, chunk, keep, alike) for alike in (True, False)))


def test_pieces_that_are_decoded_one_by_one_are_the_whole() -> None:
    """The first one ends with the first frame; what is in front of it, or fills the last one, does not count.

    One program makes all of them. Where the first frame has one of its own, tests of whole videos compare.
    """
    model, weights = vae("2.1")
    filled = jnp.pad(drawn(3), ((0, 0), (0, 0), (2, 1), (0, 0), (0, 0)), constant_values=9.0)

    def piece(weights: Any, latents: jax.Array, past: Any, first: jax.Array) -> Any:
        return bind(model, weights).decode_piece(latents, past, first=first)

    begin = filled[:, :, :3], None, jnp.bool_(True)
    spec = jax.eval_shape(piece, weights, *begin)[1]
    past, made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec), []
    following = fast_jit(piece)
    for start in (0, 3):
        frames, past = following(weights, filled[:, :, start : start + 3], past, jnp.bool_(start == 0))
        made.append(frames if start else frames[:, -1:])
    agree(jnp.concatenate(made, 1)[:, :9], decoded("2.1", 3, 1, 5, True)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "frames", "chunk", "given"),
    [("2.1", 9, 1, None), ("2.2", 13, 2, 13), ("2.1", 9, 1, 5), ("2.1", 5, 1, 1)],
)
def test_encode(form: str, frames: int, chunk: int, given: int | None) -> None:
    model, weights = vae(form)
    size = (2 * model.spatial, 3 * model.spatial)
    video = jnp.asarray(np.random.default_rng(2).uniform(-1, 1, (1, frames, *size, 3)), jnp.float32)

    def encode(weights: Any, video: jax.Array, alike: bool) -> Any:
        count = None if given is None else jnp.int32(given)
        mean, _ = bind(model, weights).encode(video, chunk, given=count, alike=alike)
        return mean[:, :, : -(-(given or frames) // 4)]

    found, expected = (
        fast_jit(functools.partial(encode, alike=alike))(weights, video) for alike in (True, False)
    )
    agree(found, expected)
