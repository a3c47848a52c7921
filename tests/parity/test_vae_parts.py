"""Parts of both Wan VAEs, their parameters and configs, against diffusers' on the CPU, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders import autoencoder_kl_wan as diffusers_vae

from helpers.compiling import fast_jit
from helpers.naive import load_params
from helpers.vae_reference import (
    TOLERANCE,
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
from wanbuild.models.vae_residual import average_down, duplicate_up, patchify, unpatchify


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
    reference = diffusers_vae.WanAttentionBlock(8).eval()
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


def test_config_defaults() -> None:
    config = parse_config(VAEConfig, {"_class_name": "AutoencoderKLWan", "dropout": 0.1}, "config.json")
    with torch.device("meta"):
        default = dict(AutoencoderKLWan().config)
    for name in ("base_dim", "z_dim", "num_res_blocks"):
        assert getattr(config, name) == default[name]
    for name in ("dim_mult", "temperal_downsample", "latents_mean", "latents_std"):
        assert list(getattr(config, name)) == default[name]
    assert config.decoder_dim == 96
