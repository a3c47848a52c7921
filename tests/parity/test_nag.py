"""Normalised attention guidance against its authors' formula in diffusers' transformers, of random values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from helpers.eight_bits import layers_of, rounded, stored
from helpers.fast_compile import fast_jit
from helpers.nag_reference import avoiding
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES
from wanbuild.models.attention import blocked_attention
from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.params import bind
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig

FLOAT32 = 5e-6  # seen: 4e-7
USUAL, MILD = (11.0, 2.5, 0.25), (2.0, 1.5, 0.8)  # the first limits all tokens, the second some
SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "ffn_dim": 64,
    "num_layers": 3,
    "text_dim": 32,
    "freq_dim": 64,
}
IMAGES = {"in_channels": 36, "image_dim": 40, "added_kv_proj_dim": 48}
LATENT = (3, 4, 6)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Guided:
    """A transformer, and two videos of one prompt; ``text`` has the prompt's rows and the negative one's."""

    def __init__(self, eight_bits: str = "", **more: Any) -> None:
        self.reference = WanTransformer3DModel(**SIZES, **more, out_channels=16).eval()
        self.module = WanTransformer(TransformerConfig(**SIZES, **more), jnp.float32)
        state = randomise(self.reference, seed=0)
        self.params = load_params(state, TRANSFORMER_RULES, self.module)
        if eight_bits:
            matrices = [key for key, value in state.items() if key.startswith("blocks.") and value.ndim == 2]
            values = rounded(state, matrices, eight_bits).items()
            self.reference.load_state_dict({key: torch.from_numpy(value) for key, value in values})
            layers = layers_of(self.module, eight_bits)
            self.module = store_in_eight_bits(self.module, layers)
            self.params = stored(self.params, layers, True)
        self.x, self.text = normal(1, 2, self.reference.config.in_channels, *LATENT), normal(2, 2, 512, 32)
        self.text += 2 * normal(3, 2, 1, 32)  # else the means of so many rows would be alike
        self.image = normal(3, 1, 10, 40) if "image_dim" in more else None
        self._forward = fast_jit(self._run)

    def _run(self, params: Any, text: Any, nag: Any, prompt: Any) -> Any:
        model = bind(self.module, params)
        images = {} if self.image is None else {"image_tokens": jnp.asarray(self.image)}
        cache, rope = model.prepare(text, LATENT, jnp.float32, **images)
        arguments = jnp.float32(700), cache, rope, {}, blocked_attention, jnp.float32
        return model.predictor(self.x, *arguments, nag)(prompt)

    def ours(self, settings: tuple[float, ...], prompt: int = 0, text: Any = None) -> np.ndarray:
        text = self.text if text is None else text
        return np.asarray(self._forward(self.params, text, np.float32(settings), np.int32(prompt)))

    def theirs(self, settings: Any = None, prompt: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the velocity, and of each attention that was guided the tokens that were limited."""
        images = {} if self.image is None else {"encoder_hidden_states_image": torch.from_numpy(self.image)}
        guided = nullcontext([]) if settings is None else avoiding(self.reference, self.text[1:], settings)
        with torch.no_grad(), guided as limited:
            given = {"encoder_hidden_states": torch.from_numpy(self.text[[prompt] * 2])}
            images = {name: one.repeat(2, 1, 1) for name, one in images.items()}
            found = self.reference(
                torch.from_numpy(self.x), torch.full((2,), 700), **given, **images, return_dict=False
            )
        return found[0].numpy(), limited


@pytest.fixture(
    scope="module",
    params=[{"in_channels": 16}, {"eight_bits": "int8", **IMAGES}],
    ids=["text", "image and 8 bits"],
)
def guided(request: pytest.FixtureRequest) -> Guided:
    return Guided(**request.param)


@pytest.mark.parametrize("settings", [USUAL, MILD])
def test_guided_away(guided: Guided, settings: tuple[float, float, float]) -> None:
    expected, limited = guided.theirs(settings)
    assert len(limited) == SIZES["num_layers"]
    assert np.mean(limited) == 1 if settings == USUAL else 0 < np.mean(limited) < 1
    error = relative_error(guided.ours(settings), expected)
    print(f"{error:.1e}, {np.mean(limited):.0%} of the tokens limited")
    assert error < FLOAT32
    assert relative_error(expected, guided.theirs()[0]) > 1000 * FLOAT32


def test_other_passes_stay_as_they_are(guided: Guided) -> None:
    """A scale of 1 takes nothing of the negative prompt, to the bit; nor is its own pass guided."""
    off, zeros = guided.ours((1, 2.5, 0.25)), np.stack([guided.text[0], np.zeros_like(guided.text[0])])
    assert np.array_equal(off, guided.ours((1, 7, 1), text=zeros))
    assert relative_error(off, guided.theirs()[0]) < FLOAT32
    assert np.array_equal(guided.ours(USUAL, prompt=1), guided.ours((1, 2.5, 0.25), prompt=1))
    assert relative_error(guided.ours(USUAL, prompt=1), guided.theirs(prompt=1)[0]) < FLOAT32
