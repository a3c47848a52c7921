"""The transformer of Helios against diffusers' HeliosTransformer3DModel, every parameter random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.helios import FIELDS, Pair
from helpers.reference_models import relative_error
from wanbuild.config import ConfigError
from wanbuild.models.attention import blocked_attention
from wanbuild.models.helios import PAST, HeliosConfig, HeliosTransformer

FLOAT32 = 1e-5  # seen: 4e-7
SIZE = (6, 10)
"""Rows and columns of latents of which neither ``patch_mid`` nor ``patch_long`` makes whole patches."""


def inputs(shape: tuple[int, int, int], size: tuple[int, int], filled: int, batch: int = 1) -> Any:
    """A chunk, a timestep, a prompt, and a past of which the last latent frames are filled."""
    rng = np.random.default_rng(filled)
    x, first, past = (
        rng.standard_normal((batch, 16, *wanted)).astype(np.float32)
        for wanted in (shape, (1, *size), (PAST, *size))
    )
    past[:, :, : PAST - filled] = 0
    embeddings = rng.standard_normal((batch, 512, 32)).astype(np.float32)
    return x, np.float32(333.25), embeddings, first * (filled > 0), past


@pytest.fixture(scope="module")
def published() -> Pair:
    return Pair()


@pytest.mark.parametrize("filled", [PAST, 9, 1, 0])
def test_the_published_config(published: Pair, filled: int) -> None:
    """A full past, that behind one chunk, behind an image alone, and none."""
    given = inputs((9, *SIZE), SIZE, filled)
    expected = published.expected(*given)
    assert relative_error(published.forward(published.params, *given), expected) < FLOAT32


@pytest.mark.thorough
@pytest.mark.parametrize(("batch", "shape", "tokens"), [(1, (2, 4, 4), 128), (2, (3, 2, 6), 129)])
def test_a_smaller_chunk(published: Pair, batch: int, shape: tuple[int, int, int], tokens: int) -> None:
    """As in a pyramid: the past keeps its size."""
    given = inputs(shape, (8, 24), PAST, batch)
    expected = published.expected(*given)
    assert relative_error(published.forward(published.params, *given), expected) < FLOAT32
    module = HeliosTransformer(HeliosConfig(**FIELDS), jnp.float32)
    assert len(module.tables(shape, (8, 24))["cos"]) == tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_history_timestep": False, "is_amplify_history": True},
        {"guidance_cross_attn": False, "is_amplify_history": True, "history_scale_mode": "scalar"},
    ],
)
def test_other_configs(published: Pair, changes: Mapping[str, Any]) -> None:
    other, given = Pair(**changes), inputs((2, *SIZE), SIZE, 9)
    expected = other.expected(*given)
    assert relative_error(other.forward(other.params, *given), expected) < FLOAT32
    assert relative_error(published.expected(*given), expected) > 1e-2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope_dim": (44, 42, 42)}, r"rope_dim is \[44, 42, 42\], and a head here has \[8, 6, 6\]"),
        ({"patch_size": (1, 1, 2)}, r"patch_size is \[1, 1, 2\], and Helios has \[1, 2, 2\]"),
        ({"image_dim": 8, "added_kv_proj_dim": 40}, "image_dim is 8"),
    ],
)
def test_unknown_configs_are_refused(changes: Mapping[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        HeliosConfig(**{**FIELDS, **changes})


def test_what_is_remembered() -> None:
    """The last latent frames of all, and the first one of the first chunk."""
    module = HeliosTransformer(HeliosConfig(**FIELDS), jnp.float32)
    frames = jnp.arange(PAST + 18, dtype=jnp.float32)[None, None, :, None, None]
    cache = {"past": frames[:, :, :PAST], "first": -frames[:, :, :1]}
    for number in (1, 2):
        chunk = frames[:, :, PAST + 9 * (number - 1) :][:, :, :9]
        first = module.remember(cache, {}, chunk, jnp.int32(0), blocked_attention, jnp.float32)["first"]
        assert first.ravel().tolist() == [PAST + 9 * (number - 1)]
        cache = module.remember(cache, {}, chunk, jnp.int32(number), blocked_attention, jnp.float32)
    assert cache["past"].ravel().tolist() == list(range(18, PAST + 18)) and cache["first"].item() == 0
