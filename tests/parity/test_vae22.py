"""The residual VAE of Wan 2.2 against diffusers' AutoencoderKLWan on the CPU, in float32 unless a test says
otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as diffusers_vae

from helpers.vae_reference import ALL, TOLERANCE, Pair, decoded, encoded, pair, relative_error
from wanbuild.config import parse_config
from wanbuild.models import vae_residual
from wanbuild.models.params import bind
from wanbuild.models.vae_config import VAEConfig
from wanbuild.models.vae_residual import average_down, duplicate_up, patchify, unpatchify
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanrun.errors import SourceError

_RANDOM = np.random.default_rng(48).uniform(0.5, 1.5, (2, 48))

# As published, in small: 16 channels and up, so that winograd is used, and others in the decoder.
CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "decoder_base_dim": 20,
    "z_dim": 48,
    "num_res_blocks": 1,
    "dim_mult": (1, 2, 4, 4),
    "temperal_downsample": (False, True, True),
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "latents_mean": tuple(map(float, _RANDOM[0] - 1)),
    "latents_std": tuple(map(float, _RANDOM[1])),
}

# Levels whose shortcuts average eight values, average two, and repeat what differs from frame to frame.
OTHER = {"dim_mult": (1, 1, 4, 4), "temperal_downsample": (True, True, False)}

WIDE, TALL = (2, 3), (3, 2)


def vae(**changes: Any) -> Pair:
    """A pair of this configuration with some fields changed."""
    return pair(**CONFIG | changes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("frames", "chunk", "size", "changes"),
    [
        (1, 1, WIDE, {}),
        (5, 3, WIDE, {}),  # a last piece that is filled up
        (5, ALL, WIDE, {}),
        (3, 1, WIDE, {**OTHER, "num_res_blocks": 2}),
    ],
)
def test_decode_matches_reference(
    frames: int, chunk: int, size: tuple[int, int], changes: dict[str, Any]
) -> None:
    model = vae(**changes)
    latents = model.draw_latents(frames, size)
    expected = decoded(model.reference, latents)
    assert expected.shape == (1, 4 * frames - 3, 16 * size[0], 16 * size[1], 3)
    # A judge that is mostly clipped, or constant, would see nothing.
    assert expected.std() > 0.05
    assert np.mean(np.abs(expected) == 1) < 0.05
    assert relative_error(model.decode(latents, chunk), expected) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("frames", "chunk", "size", "changes"),
    [
        (1, 1, TALL, {}),
        (5, 3, TALL, {}),
        (5, ALL, TALL, {}),
        (3, 1, WIDE, {**OTHER, "num_res_blocks": 2}),
    ],
)
def test_encode_matches_reference(
    frames: int, chunk: int, size: tuple[int, int], changes: dict[str, Any]
) -> None:
    model = vae(**changes)
    video = model.draw_video(frames, size)
    for found, expected in zip(model.encode(video, chunk), encoded(model.reference, video), strict=True):
        assert relative_error(found, expected) < TOLERANCE


def test_pieces_make_the_whole() -> None:
    """However a video is cut: sums in another order are all that differs."""
    model = vae()
    latents, video = model.draw_latents(5, WIDE), model.draw_video(5, TALL)
    whole = np.asarray(model.decode(latents, ALL))
    assert relative_error(model.decode(latents, 3), whole) < TOLERANCE / 2
    for found, expected in zip(model.encode(video, 3), model.encode(video, ALL), strict=True):
        assert relative_error(found, np.asarray(expected)) < TOLERANCE / 2


@pytest.mark.thorough
def test_winograd_matches_reference() -> None:
    """The CPU's form, of two videos at once."""
    model = vae()
    latents, video = model.draw_latents(3, WIDE, batch=2), model.draw_video(2, TALL)
    found = model.decode(latents, 1, algorithm="winograd")
    assert relative_error(found, decoded(model.reference, latents)) < TOLERANCE
    found = model.encode(video, 1, algorithm="winograd")
    for moment, expected in zip(found, encoded(model.reference, video), strict=True):
        assert relative_error(moment, expected) < TOLERANCE


def test_pieces_are_seen_as_pictures() -> None:
    """``finish`` and ``start`` work on colours, not on patches."""
    model = vae()
    seen = []

    def see(video: jax.Array) -> jax.Array:
        seen.append(video.shape)
        return video

    def both(params: dict[str, Any], latents: jax.Array) -> Any:
        module = bind(model.module, params)
        return module.encode(module.decode(latents, 1, finish=see), 1, start=see)

    mean, _ = jax.eval_shape(both, model.params, model.draw_latents(2, TALL))
    assert mean.shape == (1, 48, 2, *TALL)
    pieces = [(1, 1, 48, 32, 3), (1, 4, 48, 32, 3)]
    assert seen == [*pieces, (1, 5, 48, 32, 3), *pieces]  # in between, ``encode`` asks for the shape


def test_bfloat16_is_close_to_float32() -> None:
    """8 bits per activation: 61 dB of the range of 2 was measured, and 14 dB is what noise would give."""
    model = vae()
    latents = model.draw_latents(2, WIDE)
    found = model.decode(latents, 1, dtype=jnp.bfloat16)
    assert found.dtype == jnp.float32
    error = np.mean(np.square(np.asarray(found) - decoded(model.reference, latents)))
    assert 10 * np.log10(4 / error) > 50


def test_memory_does_not_grow_with_frames() -> None:
    model = vae()
    few, many = 9, 25
    temporary = [model.temporary_bytes("decode", (1, 48, frames, 4, 4)) for frames in (few, many)]
    # Per pixel and channel, what is returned (one byte) may be there twice, while it is joined; one frame's
    # activations alone are 20 channels of four bytes.
    output_bytes = 4 * (many - few) * 64 * 64 * 3
    latent_bytes = 4 * (many - few) * 48 * 4 * 4
    assert temporary[1] - temporary[0] <= 2 * (output_bytes + latent_bytes)


def _zeros_of(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *arguments: jnp.zeros_like(function(*arguments))


@pytest.mark.parametrize("left_out", ["average_down", "duplicate_up"])
def test_a_shortcut_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    function = getattr(vae_residual, left_out)
    monkeypatch.setattr(vae_residual, left_out, lambda *arguments: jnp.zeros_like(function(*arguments)))
    model, chunk = vae(), 7  # a program of its own
    if left_out == "average_down":
        video = model.draw_video(1, WIDE)
        found, expected = model.encode(video, chunk)[0], encoded(model.reference, video)[0]
    else:
        latents = model.draw_latents(1, WIDE)
        found, expected = model.decode(latents, chunk), decoded(model.reference, latents)
    assert relative_error(found, expected) > 1000 * TOLERANCE


def _torch(function: Callable[..., torch.Tensor], x: np.ndarray, *arguments: Any) -> np.ndarray:
    """Applies a function of (B, C, T, H, W) to (B, T, H, W, C)."""
    with torch.no_grad():
        return function(torch.from_numpy(x).permute(0, 4, 1, 2, 3), *arguments).permute(0, 2, 3, 4, 1).numpy()


@pytest.mark.parametrize(
    ("dim", "out_dim", "time", "space"),
    [(6, 6, 1, 2), (6, 12, 2, 2), (12, 3, 2, 2), (12, 6, 2, 1), (6, 12, 1, 2), (6, 6, 1, 1)],
)
def test_shortcuts_are_the_reference_s(dim: int, out_dim: int, time: int, space: int) -> None:
    """Down and up, for frames that fill groups, and for one alone."""
    rng = np.random.default_rng(0)
    down, up = (jax.jit(function, static_argnums=(1, 2, 3)) for function in (average_down, duplicate_up))
    for frames in (1, 4):
        x = rng.standard_normal((2, frames, 4, 6, dim), dtype=np.float32)
        expected = _torch(diffusers_vae.AvgDown3D(dim, out_dim, time, space), x)
        np.testing.assert_allclose(down(x, out_dim, time, space), expected, rtol=0, atol=1e-6)
        # And the other way, from what has out_dim channels.
        x = rng.standard_normal((2, frames, 4, 6, out_dim), dtype=np.float32)
        expected = _torch(diffusers_vae.DupUp3D(out_dim, dim, time, space), x)
        np.testing.assert_array_equal(up(x, dim, time, space), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_patches_are_the_reference_s(size: int) -> None:
    video = np.random.default_rng(0).standard_normal((2, 3, 6, 12, 3), dtype=np.float32)
    patches = _torch(diffusers_vae.patchify, video, size)
    np.testing.assert_array_equal(patchify(jnp.asarray(video), size), patches)
    np.testing.assert_array_equal(unpatchify(jnp.asarray(patches), size), video)
    np.testing.assert_array_equal(_torch(diffusers_vae.unpatchify, patches, size), video)


def test_published_config() -> None:
    published = PUBLISHED_MODELS["Wan2.2-TI2V-5B-Diffusers"]["vae"]
    config = parse_config(VAEConfig, published, "config.json")
    assert (config.spatial, config.z_dim, config.decoder_dim) == (16, 48, 256)
    assert list(config.latents_mean) == published["latents_mean"]
    assert list(config.latents_std) == published["latents_std"]
    assert len(config.latents_std) == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "patch_size is None where is_residual True needs 2"),
        ({"patch_size": 1}, "patch_size is 1 where"),
        ({"is_residual": False}, "patch_size is 2 where is_residual False needs None"),
        ({"in_channels": 3}, "in_channels is 3 where patch_size 2 needs 12"),
        ({"out_channels": 3}, "out_channels is 3 where"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial is 8 where patch_size 2 needs 16"),
        ({"patch_size": None, "is_residual": False}, "in_channels is 12 where patch_size None needs 3, out"),
        ({"z_dim": 16}, "latents_mean has 48 values for z_dim 16"),
        ({"dim_mult": [1, 2, 4, 5]}, "a shortcut of the encoder cannot average 4 to 5"),
        ({"dim_mult": [1, 3, 3, 3]}, "a shortcut of the encoder cannot average 8 to 3"),
        ({"dim_mult": [1, 1, 8, 8]}, "a shortcut of the decoder cannot repeat 8 to 4"),
        ({"dim_mult": [1, 2, 0, 0]}, "a level without channels"),
        ({"clip": True}, "unknown field clip"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    published = PUBLISHED_MODELS["Wan2.2-TI2V-5B-Diffusers"]["vae"]
    with pytest.raises(SourceError, match=message) as caught:
        parse_config(VAEConfig, {**published, **changes}, "config.json")
    assert caught.value.exit_code == 4


def test_encode_refuses_half_a_cell() -> None:
    model = vae()
    with pytest.raises(ValueError, match=r"\(5, 24, 32\)"):
        model.encode(np.zeros((1, 5, 24, 32, 3), np.float32), 1)
