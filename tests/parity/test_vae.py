"""The VAE against diffusers' AutoencoderKLWan on the CPU, in float32 unless a test says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.vae_reference import (
    ALL,
    TOLERANCE,
    Pair,
    decoded,
    encoded,
    pair,
    randomize,
    relative_error,
)
from wanbuild.config import parse_config
from wanbuild.mapping.vae_rules import VAE_RULES
from wanbuild.models.convolution import conv3x3x3, upsample_conv3x3
from wanbuild.models.params import bind
from wanbuild.models.vae import WanVAE
from wanbuild.models.vae_blocks import AttentionBlock, Stream
from wanbuild.models.vae_config import VAEConfig
from wanrun.errors import SourceError


def vae(num_res_blocks: int = 1, **more: Any) -> Pair:
    """Channels change between levels, so that shortcuts are there; 16 and up, so that winograd is used."""
    return pair(**{"base_dim": 16, "dim_mult": (1, 2, 2, 4), "num_res_blocks": num_res_blocks} | more)


@pytest.mark.thorough
@pytest.mark.parametrize(("frames", "chunk", "blocks"), [(1, 2, 1), (4, 1, 1), (4, 2, 2)])
def test_decode_matches_reference(frames: int, chunk: int, blocks: int) -> None:
    model = vae(blocks)
    latents = model.draw_latents(frames)
    expected = decoded(model.reference, latents)
    # A judge that is mostly clipped, or constant, would see nothing.
    assert expected.std() > 0.05
    assert np.mean(np.abs(expected) == 1) < 0.05
    assert relative_error(model.decode(latents, chunk), expected) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(("frames", "chunk", "blocks"), [(1, 2, 1), (4, 2, 2), (4, ALL, 1)])
def test_encode_matches_reference(frames: int, chunk: int, blocks: int) -> None:
    model = vae(blocks)
    video = model.draw_video(frames)
    for found, expected in zip(model.encode(video, chunk), encoded(model.reference, video), strict=True):
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.thorough
def test_winograd_matches_reference() -> None:
    """The CPU's form, whose first level sees odd sizes (3x5, one frame per piece)."""
    model = vae(decoder_base_dim=32)
    latents = model.draw_latents(3, batch=2)
    found = model.decode(latents, 1, algorithm="winograd")
    assert relative_error(found, decoded(model.reference, latents)) < TOLERANCE


def test_narrow_channels_match_reference() -> None:
    """The smallest configuration in use, with one channel where levels meet, in the CPU's form."""
    model = vae(base_dim=3, dim_mult=(1, 1, 1, 1))
    latents = model.draw_latents(3)
    found = model.decode(latents, 2, algorithm="winograd")
    assert relative_error(found, decoded(model.reference, latents)) < TOLERANCE


@pytest.mark.thorough
def test_pieces_are_converted_one_by_one() -> None:
    model = vae()
    latents = model.draw_latents(4)
    frames = np.random.default_rng(0).integers(0, 256, (1, 13, 24, 40, 3), np.uint8)

    def to_uint8(video: jax.Array) -> jax.Array:
        return jnp.round((video + 1) * 127.5).astype(jnp.uint8)

    def from_uint8(video: jax.Array) -> jax.Array:
        return video.astype(jnp.float32) / 127.5 - 1

    found = model.decode(latents, 2, finish=to_uint8)
    assert found.dtype == jnp.uint8
    expected = np.asarray(to_uint8(jnp.asarray(decoded(model.reference, latents))), np.int32)
    # Float32 noise may carry a value across the middle between two integers, in about one of 1e4 values.
    assert np.abs(np.asarray(found) - expected).max() <= 1
    assert np.mean(np.asarray(found) != expected) < 1e-3
    mean = model.encode(frames, 2, start=from_uint8)[0]
    expected = encoded(model.reference, np.array(from_uint8(jnp.asarray(frames))))[0]
    assert relative_error(mean, expected) < TOLERANCE


def test_bfloat16_is_close_to_float32() -> None:
    """8 bits per activation: 64 dB of the range of 2 was measured, and 8 dB is what noise would give."""
    model = vae()
    latents = model.draw_latents(2)
    found = model.decode(latents, 1, dtype=jnp.bfloat16)
    assert found.dtype == jnp.float32
    error = np.mean(np.square(np.asarray(found) - decoded(model.reference, latents)))
    assert 10 * np.log10(4 / error) > 50


@pytest.mark.parametrize("left_out", ["mid_block/attentions/0/proj", "up_blocks/1/upsampler/time_conv"])
def test_judge_is_sensitive(left_out: str) -> None:
    """A layer that does nothing is noticed."""
    model = vae()
    damaged = replace(model, params=jax.tree.map(np.copy, model.params))
    node = damaged.params["decoder"]
    for name in left_out.split("/"):
        node = node[name]
    node["weight"][...] = 0
    latents = model.draw_latents(4)
    assert relative_error(damaged.decode(latents, 1), decoded(model.reference, latents)) > 100 * TOLERANCE


def test_history_reaches_the_next_piece() -> None:
    """What a piece shows depends on the pieces before it, and never on those after it."""
    model = vae()
    latents = model.draw_latents(4)
    video = np.asarray(model.decode(latents, 1))
    changed = latents.copy()
    changed[:, :, 1] += 1
    other = np.asarray(model.decode(changed, 1))
    np.testing.assert_array_equal(video[:, :1], other[:, :1])
    assert np.abs(video[:, 5:] - other[:, 5:]).max() > 0.01


def test_memory_does_not_grow_with_frames() -> None:
    model = vae()
    few, many = 9, 25
    temporary = [model.temporary_bytes("decode", (1, 16, frames, 8, 8)) for frames in (few, many)]
    # Per pixel and channel, what is returned (one byte) may be there twice, while it is joined; one frame's
    # activations alone are 16 channels of four bytes.
    output_bytes = 4 * (many - few) * 64 * 64 * 3
    latent_bytes = 4 * (many - few) * 16 * 8 * 8
    assert temporary[1] - temporary[0] <= 2 * (output_bytes + latent_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (1, 1, 5, 7), (1, 3, 601, 31)])
def test_convolution_forms_agree(shape: tuple[int, int, int, int]) -> None:
    """Odd sizes, and a picture so tall that it is cut into bands."""
    B, T, H, W = shape
    rng = np.random.default_rng(0)
    channels, out = (64, 32) if H > 100 else (17, 16)
    x = rng.standard_normal((B, T + 2, H, W, channels), dtype=np.float32)
    kernel = rng.standard_normal((3, 3, 3, channels, out), dtype=np.float32) / (27 * channels) ** 0.5

    def check(f: Callable[..., jax.Array], x: np.ndarray, kernel: np.ndarray) -> None:
        run = fast_jit(f, static_argnums=2)
        expected, found = np.asarray(run(x, kernel, "direct")), run(x, kernel, "winograd")
        # The transforms add up to 64 terms of one sign: a few times the noise of the sum itself, 1e-6.
        assert relative_error(found, expected) < 5e-6
        # In bfloat16 the CPU's form computes in float32: what differs is the result's and x's rounding.
        half = run(x.astype(jnp.bfloat16), kernel, "winograd")
        assert half.dtype == jnp.bfloat16
        assert relative_error(half.astype(jnp.float32), expected) < 2**-7

    check(conv3x3x3, x, kernel)
    check(upsample_conv3x3, x[:, :1, : H // 2, : W // 2], kernel[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_transformed_kernel_is_held_at_a_time(dtype: Any) -> None:
    """Those of all layers, 2.4 times the weights, would be the largest thing in memory."""
    layers, dim = 8, 96

    def chain(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        for kernel in kernels:
            x = x + conv3x3x3(jnp.pad(x, ((0, 0), (2, 0), *((0, 0),) * 3)), kernel, "winograd")
        return x

    x = jax.ShapeDtypeStruct((1, 2, 4, 4, dim), jnp.float32)
    kernels = [jax.ShapeDtypeStruct((3, 3, 3, dim, dim), dtype)] * layers
    compiled = fast_jit(chain).lower(x, kernels).compile()
    one_kernel = 4**3 * 4 * dim * dim
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * one_kernel


def test_attention_in_blocks_matches_reference() -> None:
    """60x70 pixels have more scores than are held at once, in a number of queries that does not divide."""
    reference = WanAttentionBlock(8).eval()
    randomize(reference, 1)
    module = AttentionBlock(8, jnp.float32)
    params = {
        "norm": {"gamma": reference.norm.gamma.detach().numpy().reshape(-1)},
        **{
            name: {
                "weight": getattr(reference, name).weight.detach().numpy()[:, :, 0, 0],
                "bias": getattr(reference, name).bias.detach().numpy(),
            }
            for name in ("to_qkv", "proj")
        },
    }
    x = np.random.default_rng(2).standard_normal((1, 2, 60, 70, 8), dtype=np.float32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(x).permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1).numpy()
    found = fast_jit(lambda p, x: bind(module, p)(x, Stream(None, "direct")))(params, x)
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        {"decoder_base_dim": 8, "base_dim": 4},
    ],
)
def test_mapping_covers_every_key(config: dict[str, Any]) -> None:
    """The published configuration, the smallest, and one whose decoder differs; shapes only."""
    with torch.device("meta"):
        reference = AutoencoderKLWan(**config)
    # Views of one zero have the shapes without the memory.
    shapes = {
        key: np.broadcast_to(np.float32(0), value.shape) for key, value in reference.state_dict().items()
    }
    module = WanVAE(parse_config(VAEConfig, json.loads(reference.to_json_string()), "config.json"))
    load_params(shapes, VAE_RULES, module)


def test_config_defaults_and_refusals() -> None:
    config = parse_config(VAEConfig, {"_class_name": "AutoencoderKLWan", "dropout": 0.1}, "config.json")
    with torch.device("meta"):
        default = dict(AutoencoderKLWan().config)
    for name in ("base_dim", "z_dim", "num_res_blocks"):
        assert getattr(config, name) == default[name]
    for name in ("dim_mult", "temperal_downsample", "latents_mean", "latents_std"):
        assert list(getattr(config, name)) == default[name]
    assert config.decoder_dim == 96
    for bad, message in (
        ({"z_dim": 48}, "latents_mean"),
        ({"dim_mult": [1, 2]}, "dim_mult"),
        ({"temperal_downsample": [True, True, True]}, "temperal_downsample"),
        ({"surprise": 1}, "surprise"),
    ):
        with pytest.raises(SourceError, match=message):
            parse_config(VAEConfig, bad, "config.json")


@pytest.mark.parametrize("shape", [(1, 4, 16, 16, 3), (1, 5, 12, 16, 3)])
def test_encode_refuses_shapes_that_do_not_fit(shape: tuple[int, ...]) -> None:
    model = vae()
    with pytest.raises(ValueError, match="4n\\+1 frames"):
        model.encode(np.zeros(shape, np.float32), 1)
