"""Transformers that take images, against diffusers', every parameter random: the image branch and VACE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from helpers.refusals import refuses
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES, VACE_RULES
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.vace import VACEConfig, VACETransformer
from wanrun.errors import SourceError

FLOAT32 = 5e-6  # seen: 4e-7; a wrong query, split or scale is worth 1e-2 and more
BFLOAT16 = 2e-2  # seen: 6e-3
LATENT = (3, 4, 6)
SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "ffn_dim": 64,
    "num_layers": 4,
    "text_dim": 32,
    "freq_dim": 64,
}
TOKENS = 10  # of one image: not a multiple of anything that is padded to


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


class Images:
    """The base with an image branch: of one image, or of a first and a last one with positions."""

    def __init__(self, images: int) -> None:
        extra = {"in_channels": 36, "image_dim": 40, "added_kv_proj_dim": 48}
        if images == 2:
            extra["pos_embed_seq_len"] = 2 * TOKENS
        torch.manual_seed(0)
        self.reference = WanTransformer3DModel(**SIZES, **extra, out_channels=16).eval()
        self.module = WanTransformer(TransformerConfig(**SIZES, **extra), jnp.float32)
        self.params = load_params(randomise(self.reference, seed=images), TRANSFORMER_RULES, self.module)
        self.images = images
        self.x, self.channels = normal(1, 2, 16, *LATENT), normal(2, 20, *LATENT)
        self.text, self.tokens = normal(3, 2, 512, 32), normal(4, images, TOKENS, 40)
        self._forward = fast_jit(self._run, static_argnums=(2, 3))

    def _run(self, params: Any, tokens: Any, multiple: int, dtype: Any) -> Any:
        model = bind(self.module, params)
        cache, rope = model.prepare(self.text, LATENT, dtype, image_tokens=tokens, image_multiple=multiple)
        condition = {"channels": jnp.asarray(self.channels)}
        return model(self.x, jnp.float32(700), cache, rope, condition, blocked_attention, dtype)

    def ours(self, tokens: Any = None, multiple: int = 1, dtype: Any = jnp.float32) -> np.ndarray:
        tokens = self.tokens if tokens is None else tokens
        return np.asarray(self._forward(self.params, tokens, multiple, dtype))

    def theirs(self) -> np.ndarray:
        x = np.concatenate([self.x, np.broadcast_to(self.channels, (2, *self.channels.shape))], 1)
        # The reference makes one row of the two images' tokens itself; a batch of two needs them twice.
        tokens = torch.from_numpy(self.tokens).repeat(2, 1, 1)
        with torch.no_grad():
            return self.reference(
                torch.from_numpy(x),
                torch.full((2,), 700),
                torch.from_numpy(self.text),
                tokens,
                return_dict=False,
            )[0].numpy()


@pytest.fixture(scope="module", params=[1, 2], ids=["image", "first-last"])
def images(request: pytest.FixtureRequest) -> Images:
    return Images(request.param)


def test_image_branch(images: Images) -> None:
    assert relative_error(images.ours(), images.theirs()) < FLOAT32


def test_image_branch_bfloat16(images: Images) -> None:
    assert 1e-4 < relative_error(images.ours(dtype=jnp.bfloat16), images.theirs()) < BFLOAT16


def test_padding_changes_nothing(images: Images) -> None:
    """As on a TPU, where image tokens are padded: the same within the rounding of sums in another order."""
    assert relative_error(images.ours(multiple=256), images.ours()) < 1e-6


def test_the_image_matters(images: Images) -> None:
    """And the order of two of them, which the positions tell apart."""
    assert relative_error(images.ours(normal(5, *images.tokens.shape)), images.ours()) > 1e-3
    if images.images == 2:
        assert relative_error(images.ours(images.tokens[::-1].copy()), images.ours()) > 1e-3


class Control:
    """VACE with control blocks at layers that are not evenly spaced."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        extra: dict[str, Any] = {"vace_layers": layers, "vace_in_channels": 96}
        self.reference = WanVACETransformer3DModel(**SIZES, **extra, in_channels=16, out_channels=16).eval()
        self.module = VACETransformer(VACEConfig(**SIZES, **extra), jnp.float32)
        self.params = load_params(randomise(self.reference, seed=3), VACE_RULES, self.module)
        self.x, self.control, self.text = (
            normal(1, 2, 16, *LATENT),
            normal(2, 96, *LATENT),
            normal(3, 2, 512, 32),
        )
        self.scale = np.linspace(0.5, 1.5, len(layers), dtype=np.float32)
        self._forward = fast_jit(self._run, static_argnums=3)

    def _run(self, params: Any, control: Any, scale: Any, dtype: Any) -> Any:
        model = bind(VACETransformer(self.module.config, dtype, dtype), params)
        cache, rope = model.prepare(self.text, LATENT, dtype)
        condition = {"control": control, "scale": scale}
        return model(self.x, jnp.float32(300), cache, rope, condition, blocked_attention, dtype)

    def ours(self, scale: Any = None, params: Any = None, dtype: Any = jnp.float32) -> np.ndarray:
        scale, params = (
            self.scale if scale is None else scale,
            self.params if params is None else params,
        )
        return np.asarray(self._forward(params, self.control, scale, dtype))

    def theirs(self) -> np.ndarray:
        control = torch.from_numpy(self.control)[None].repeat(2, 1, 1, 1, 1)
        with torch.no_grad():
            return self.reference(
                torch.from_numpy(self.x),
                torch.full((2,), 300),
                torch.from_numpy(self.text),
                control_hidden_states=control,
                control_hidden_states_scale=torch.from_numpy(self.scale),
                return_dict=False,
            )[0].numpy()


@pytest.fixture(scope="module", params=[(0, 2), (0, 1, 3), (0,)], ids=str)
def control(request: pytest.FixtureRequest) -> Control:
    return Control(request.param)


@pytest.mark.thorough
def test_control(control: Control) -> None:
    assert relative_error(control.ours(), control.theirs()) < FLOAT32


ONE = pytest.mark.parametrize("control", [(0, 2)], indirect=True, ids=str)
"""Where the blocks are does not change what is rounded."""


@ONE
def test_control_bfloat16(control: Control) -> None:
    assert 1e-4 < relative_error(control.ours(dtype=jnp.bfloat16), control.theirs()) < BFLOAT16


@pytest.mark.thorough
@ONE
def test_weights_as_bits(control: Control) -> None:
    """The control blocks' weights as uint16, as a CPU program takes them, are the same weights."""
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), control.params)
    bits = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16), rounded)
    plain = control.ours(params=jax.tree.map(lambda x: x.astype(jnp.float32), rounded), dtype=jnp.bfloat16)
    assert relative_error(control.ours(params=bits, dtype=jnp.bfloat16), plain) < 1e-6


def test_every_scale_matters(control: Control) -> None:
    for index in range(len(control.scale)):
        scale = control.scale.copy()
        scale[index] = 0
        assert relative_error(control.ours(scale), control.ours()) > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"vace_layers": (0, 4)},
        {"vace_layers": (1, 2)},
        {"vace_layers": (0, 2, 1)},
        {"vace_layers": (0, 0)},
        {"vace_layers": ()},
        {"image_dim": 40, "added_kv_proj_dim": 48},
    ],
    ids=str,
)
def test_bad_vace_configs(change: dict[str, Any]) -> None:
    with refuses("mismatch", SourceError):
        VACEConfig(**{**SIZES, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"image_dim": 40},
        {"added_kv_proj_dim": 48},
        {"pos_embed_seq_len": 20},
        {"image_dim": 40, "added_kv_proj_dim": 40},
    ],
    ids=str,
)
def test_bad_image_configs(change: dict[str, Any]) -> None:
    with refuses("mismatch", SourceError):
        TransformerConfig(**{**SIZES, **change})
