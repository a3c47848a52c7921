"""Transformers against diffusers', every parameter random: the base, the image branch, VACE, and NAG."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.compiling import fast_jit
from helpers.eight_bits import layers_of, rounded, stored
from helpers.reference_guidance import avoiding
from helpers.reference_models import IMAGES, Transformers, normal, relative_error
from wanbuild.models import attention as attention_module
from wanbuild.models.attention import blocked_attention
from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.params import bind

FLOAT32 = 5e-6  # seen: 4e-7; the reference's own float32 noise against float64 is 3e-7
BFLOAT16 = 2e-2  # seen: 6e-3; a few layers of roundings of 4e-3 each
LATENT = (3, 4, 6)
TOKENS = 10  # of one image: not a multiple of anything that is padded to


@pytest.fixture(scope="module")
def base() -> Transformers:
    return Transformers("wan")


def noise(batch: int, latent: tuple[int, int, int], prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Latents and embeddings."""
    return normal(1, batch, 16, *latent), normal(2, prompts, 512, 32)


@pytest.mark.thorough
@pytest.mark.parametrize("latent", [(1, 2, 6), (3, 6, 10), (4, 8, 2)])
@pytest.mark.parametrize("timestep", [999, 500, 13])
def test_the_base(base: Transformers, latent: tuple[int, int, int], timestep: int) -> None:
    x, text = noise(2, latent, 2)
    assert relative_error(base.ours(x, timestep, text), base.theirs(x, timestep, text)) < FLOAT32


@pytest.mark.parametrize(("videos", "prompts", "timestep"), [(1, 1, 909.7), (6, 2, 700)])
def test_fractional_timesteps_and_shared_prompts(
    base: Transformers, videos: int, prompts: int, timestep: float
) -> None:
    """Euler's timesteps are not whole. Three videos a prompt attend to one set of keys, in the order of the
    doubled batch.
    """
    x, text = noise(videos, (2, 4, 6), prompts)
    reference = base.theirs(x, timestep, np.repeat(text, videos // prompts, axis=0))
    assert relative_error(base.ours(x, timestep, text), reference) < FLOAT32


@pytest.mark.thorough
@pytest.mark.parametrize("groups", ["frame", "token"])
def test_a_timestep_per_token(base: Transformers, groups: str) -> None:
    """The reference takes one per token; ours one for each group of tokens in a row, here all different."""
    tokens = 3 * 2 * 3
    count = 3 if groups == "frame" else tokens
    x, text = noise(2, LATENT, 2)
    timesteps = np.random.default_rng(6).uniform(0, 1000, (2, count)).astype(np.float32)
    reference = base.theirs(x, np.repeat(timesteps, tokens // count, axis=1), text)
    assert relative_error(base.ours(x, timesteps, text), reference) < FLOAT32
    shared = base.ours(x, timesteps[:1], text)  # one row of them for the whole batch
    repeated = base.theirs(x, np.repeat(timesteps[[0, 0]], tokens // count, axis=1), text)
    assert relative_error(shared, repeated) < FLOAT32
    assert relative_error(shared, reference) > 100 * FLOAT32


def test_query_blocks(base: Transformers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in many small query blocks is the same attention."""
    x, text = noise(1, (3, 6, 10), 1)
    whole = base.ours(x, 400, text)
    jax.clear_caches()
    monkeypatch.setattr(attention_module, "SCORES_BYTES", 4 * 45 * 7)
    assert relative_error(base.ours(x, 400, text), whole) < 1e-6  # sums of the same terms


@pytest.mark.parametrize(
    "path",
    ["blocks/attn1/norm_q/weight", "blocks/attn2/norm_k/weight", "blocks/norm2/bias", "scale_shift_table"],
)
def test_every_parameter_matters(base: Transformers, path: str) -> None:
    """The comparison sees a parameter that is left at its initial value: it can fail."""
    x, text = noise(1, (2, 4, 6), 1)
    params = jax.tree.map(np.array, base.params)
    *parents, name = path.split("/")
    node = params
    for key in parents:
        node = node[key]
    node[name][...] = 1.0 if "norm_" in path else 0.0
    wrong = base.ours(x, 500, text, params=params)
    assert relative_error(wrong, base.theirs(x, 500, text)) > 100 * FLOAT32


class Given(Transformers):
    """Two videos of two prompts, with what else a kind is given."""

    def __init__(self, kind: str, **fields: Any) -> None:
        super().__init__(kind, seed=3, **fields)
        self.x, self.text = noise(2, LATENT, 2)
        self.given: dict[str, Any] = {"condition": {}, "inputs": {}}
        self.to_theirs: dict[str, Any] = {}
        self.their_x = self.x
        if "image_dim" in fields:
            channels, tokens = normal(2, 20, *LATENT), normal(4, self._images, TOKENS, 40)
            self.given = {"condition": {"channels": channels}, "inputs": {"image_tokens": tokens}}
            self.their_x = np.concatenate([self.x, np.broadcast_to(channels, (2, *channels.shape))], 1)
            # The reference makes one row of the two images' tokens itself; a batch of two needs them twice.
            self.to_theirs["encoder_hidden_states_image"] = np.tile(tokens, (2, 1, 1))
        if kind == "vace":
            control, layers = normal(2, 96, *LATENT), fields["vace_layers"]
            scale = np.linspace(0.5, 1.5, len(layers), dtype=np.float32)
            self.given["condition"] = {"control": control, "scale": scale}
            self.to_theirs["control_hidden_states"] = np.tile(control, (2, 1, 1, 1, 1))
            self.to_theirs["control_hidden_states_scale"] = scale

    @property
    def _images(self) -> int:
        return 1 if self.config.pos_embed_seq_len is None else 2

    def made(self, **how: Any) -> np.ndarray:
        return self.ours(self.x, 700, self.text, **{**self.given, **how})

    def expected(self) -> np.ndarray:
        return self.theirs(self.their_x, 700, self.text, **self.to_theirs)


ONE_IMAGE = {"in_channels": 36, **IMAGES}
FIRST_LAST = {**ONE_IMAGE, "pos_embed_seq_len": 2 * TOKENS}
BOTH = pytest.mark.parametrize("given", [("wan", ONE_IMAGE), ("wan", FIRST_LAST)], indirect=True, ids=str)
# Control blocks at layers that are not evenly spaced. Where they are does not change what is rounded.
LAYERS = [("vace", {"vace_layers": layers}) for layers in ((0, 2), (0, 1, 3), (0,))]


@pytest.fixture(scope="module")
def given(request: pytest.FixtureRequest) -> Given:
    kind, fields = request.param
    return Given(kind, **fields)


@pytest.mark.parametrize(
    "given",
    [
        ("wan", ONE_IMAGE),
        ("wan", FIRST_LAST),
        *(pytest.param(one, marks=pytest.mark.thorough) for one in LAYERS),
    ],
    indirect=True,
    ids=str,
)
def test_images_and_control(given: Given) -> None:
    assert relative_error(given.made(), given.expected()) < FLOAT32  # a wrong query or scale is worth 1e-2


@pytest.mark.parametrize(
    "given",
    [("wan", {}), ("wan", ONE_IMAGE), ("wan", FIRST_LAST), LAYERS[0]],
    indirect=True,
    ids=str,
)
def test_bfloat16(given: Given) -> None:
    assert 1e-4 < relative_error(given.made(dtype=jnp.bfloat16), given.expected()) < BFLOAT16


@BOTH
def test_padding_changes_nothing(given: Given) -> None:
    """As on a TPU, where image tokens are padded: the same within the rounding of sums in another order."""
    assert relative_error(given.made(multiple=256), given.made()) < 1e-6


@BOTH
def test_the_image_matters(given: Given) -> None:
    """And the order of two of them, which the positions tell apart."""
    tokens = given.given["inputs"]["image_tokens"]
    others = [normal(5, *tokens.shape), *([tokens[::-1].copy()] if len(tokens) == 2 else [])]
    for other in others:
        assert relative_error(given.made(inputs={"image_tokens": other}), given.made()) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("given", LAYERS[:1], indirect=True, ids=str)
def test_weights_as_bits(given: Given) -> None:
    """The control blocks' weights as uint16, as a CPU program takes them, are the same weights."""
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), given.params)
    bits = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16), half)
    plain = given.made(params=jax.tree.map(lambda x: x.astype(jnp.float32), half), dtype=jnp.bfloat16)
    assert relative_error(given.made(params=bits, dtype=jnp.bfloat16), plain) < 1e-6


@pytest.mark.parametrize("given", LAYERS, indirect=True, ids=str)
def test_every_scale_matters(given: Given) -> None:
    condition = given.given["condition"]
    for index in range(len(condition["scale"])):
        scale = condition["scale"].copy()
        scale[index] = 0
        other = given.made(condition={**condition, "scale": scale})
        assert relative_error(other, given.made()) > 1e-3


USUAL, MILD = (11.0, 2.5, 0.25), (2.0, 1.5, 0.8)  # the first limits all tokens, the second some


class Avoiding(Transformers):
    """Two videos of one prompt, away from another: ``text`` has the rows of both."""

    def __init__(self, eight_bits: str = "", **fields: Any) -> None:
        super().__init__("wan", num_layers=3, **fields)
        if eight_bits:
            matrices = [key for key, one in self.state.items() if key.startswith("blocks.") and one.ndim == 2]
            values = rounded(self.state, matrices, eight_bits).items()
            self.reference.load_state_dict({key: torch.from_numpy(value) for key, value in values})
            layers = layers_of(self.module, eight_bits)
            self.module = store_in_eight_bits(self.module, layers)
            self.params = stored(self.params, layers, True)

        def drawn(seed: int, *shape: int) -> np.ndarray:  # with others the norm limits all tokens, or none
            return np.random.default_rng(seed).standard_normal(shape, np.float32)

        self.x = drawn(1, 2, self.config.in_channels, *LATENT)
        # Else the means of so many rows would be alike.
        self.text = drawn(2, 2, 512, 32) + 2 * drawn(3, 2, 1, 32)
        self.image = drawn(3, 1, TOKENS, 40) if "image_dim" in fields else None
        self._guided = fast_jit(self._run)

    def _run(self, params: Any, text: Any, nag: Any, prompt: Any) -> Any:
        model = bind(self.module, params)
        images = {} if self.image is None else {"image_tokens": jnp.asarray(self.image)}
        cache, rope = model.prepare(text, LATENT, jnp.float32, **images)
        arguments = jnp.float32(700), cache, rope, {}, blocked_attention, jnp.float32
        return model.predictor(self.x, *arguments, nag)(prompt)

    def made(self, settings: tuple[float, ...], prompt: int = 0, text: Any = None) -> np.ndarray:
        text = self.text if text is None else text
        return np.asarray(self._guided(self.params, text, np.float32(settings), np.int32(prompt)))

    def expected(self, settings: Any = None, prompt: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the velocity, and of each attention that was guided the tokens that were limited."""
        images = {} if self.image is None else {"encoder_hidden_states_image": self.image.repeat(2, axis=0)}
        guided = nullcontext([]) if settings is None else avoiding(self.reference, self.text[1:], settings)
        with guided as limited:
            return self.theirs(self.x, 700, self.text[[prompt] * 2], **images), limited


@pytest.fixture(scope="module", params=[{}, {"eight_bits": "int8", **ONE_IMAGE}], ids=["text", "int8, image"])
def away(request: pytest.FixtureRequest) -> Avoiding:
    return Avoiding(**request.param)


@pytest.mark.parametrize("settings", [USUAL, MILD])
def test_guided_away(away: Avoiding, settings: tuple[float, float, float]) -> None:
    """Normalised attention guidance, of which its authors' formula is the judge."""
    expected, limited = away.expected(settings)
    assert len(limited) == 3  # layers
    assert np.mean(limited) == 1 if settings == USUAL else 0 < np.mean(limited) < 1
    error = relative_error(away.made(settings), expected)
    print(f"{error:.1e}, {np.mean(limited):.0%} of the tokens limited")
    assert error < FLOAT32
    assert relative_error(expected, away.expected()[0]) > 1000 * FLOAT32


def test_other_passes_stay_as_they_are(away: Avoiding) -> None:
    """A scale of 1 takes nothing of the negative prompt, to the bit; nor is its own pass guided."""
    off, zeros = away.made((1, 2.5, 0.25)), np.stack([away.text[0], np.zeros_like(away.text[0])])
    assert np.array_equal(off, away.made((1, 7, 1), text=zeros))
    assert relative_error(off, away.expected()[0]) < FLOAT32
    assert np.array_equal(away.made(USUAL, prompt=1), away.made((1, 2.5, 0.25), prompt=1))
    assert relative_error(away.made(USUAL, prompt=1), away.expected(prompt=1)[0]) < FLOAT32
