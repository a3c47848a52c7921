"""The Animate transformer against diffusers' WanAnimateTransformer3DModel, every parameter random."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanAnimateTransformer3DModel

from helpers.animate_reference import SIZES, as_reference, config, faces, randomised
from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import relative_error
from wanbuild.mapping.transformer_rules import ANIMATE_RULES
from wanbuild.models.animate import AnimateTransformer
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import abstract_params, bind

FLOAT32 = 5e-6  # seen: 4e-7; a pose or a face that is left out is worth 1e-2 and more
BFLOAT16 = 2e-2  # seen: 7e-3
LATENT = (4, 4, 6)  # the image's frame, and three of nine frames
FRAMES = 9
TOKENS = 10
TIMESTEP = 40  # at larger ones an ulp of one of the 32 frequencies that the embedding has is worth 2e-6


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


class Pair:
    """The reference, ours, and inputs for two prompts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.reference = WanAnimateTransformer3DModel(**SIZES).eval()
        self.module = AnimateTransformer(config(), jnp.float32)
        self.params = load_params(randomised(self.reference, seed=7), ANIMATE_RULES, self.module)
        self.x, self.text, self.tokens = (
            normal(1, 2, 16, *LATENT),
            normal(2, 2, 512, 32),
            normal(3, 1, TOKENS, 40),
        )
        self.channels, self.pose = normal(4, 20, *LATENT), normal(5, 16, LATENT[0] - 1, *LATENT[1:])
        self.faces = faces(6, FRAMES, SIZES["motion_encoder_size"])
        self.compiled = fast_jit(self._run, static_argnums=(5, 6))

    def _run(self, params: Any, x: Any, text: Any, pose: Any, video: Any, dtype: Any, multiple: int) -> Any:
        model = bind(AnimateTransformer(config(), dtype), params)
        cache, rope = model.prepare(
            text, LATENT, dtype, image_tokens=self.tokens, image_multiple=multiple, face_video=video
        )
        condition = {"channels": jnp.asarray(self.channels), "pose": pose}
        return model(x, jnp.float32(TIMESTEP), cache, rope, condition, blocked_attention, dtype)

    def ours(
        self, x: Any, text: Any, pose: Any = None, video: Any = None, dtype: Any = jnp.float32, **changes: Any
    ) -> np.ndarray:
        pose, video = (
            self.pose if pose is None else pose,
            self.faces if video is None else video,
        )
        params, multiple = changes.get("params", self.params), changes.get("multiple", 1)
        return np.asarray(self.compiled(params, x, text, pose, video, dtype, multiple))

    def theirs(self, x: np.ndarray, text: np.ndarray, blank: bool = False) -> np.ndarray:
        """As the pipeline calls it: the unconditional pass with faces of -1."""
        batch = len(x)
        channels = np.broadcast_to(self.channels, (batch, *self.channels.shape))
        video = as_reference(self.faces).swapaxes(0, 1)[None]
        with torch.no_grad():
            return self.reference(
                hidden_states=torch.from_numpy(np.concatenate([x, channels], axis=1)),
                timestep=torch.full((batch,), TIMESTEP),
                encoder_hidden_states=torch.from_numpy(text),
                encoder_hidden_states_image=torch.from_numpy(self.tokens).repeat(batch, 1, 1),
                pose_hidden_states=torch.from_numpy(self.pose)[None].repeat(batch, 1, 1, 1, 1),
                face_pixel_values=(video * 0 - 1 if blank else video).repeat(batch, 1, 1, 1, 1),
                return_dict=False,
            )[0].numpy()

    def theirs_with_guidance(self) -> np.ndarray:
        """The first video with the first prompt, and the second with the negative one."""
        conditional = self.theirs(self.x[:1], self.text[:1])
        return np.concatenate([conditional, self.theirs(self.x[1:], self.text[1:], blank=True)])


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def test_one_prompt(pair: Pair) -> None:
    """Two videos of one prompt, which share its face; with image tokens padded, as on a TPU."""
    text = pair.text[:1]
    reference = pair.theirs(pair.x, text.repeat(2, axis=0))
    assert relative_error(pair.ours(pair.x, text, multiple=128), reference) < FLOAT32


def test_guidance(pair: Pair) -> None:
    """The second prompt is the negative one, and its face is black."""
    reference = pair.theirs_with_guidance()
    result = pair.ours(pair.x, pair.text)
    assert relative_error(result, reference) < FLOAT32
    with_a_face = pair.theirs(pair.x[1:], pair.text[1:])
    assert relative_error(result[1:], with_a_face) > 100 * FLOAT32


def test_bfloat16(pair: Pair) -> None:
    """Stored and computed in bfloat16, with the weights passed as uint16, as a CPU program takes them."""
    stored = abstract_params(AnimateTransformer(config()))

    def bits(x: np.ndarray, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        rounded = np.asarray(jnp.asarray(x, leaf.dtype))
        return rounded.view(np.uint16) if leaf.dtype == jnp.bfloat16 else rounded

    params = jax.tree.map(bits, pair.params, stored)
    result = pair.ours(pair.x, pair.text, dtype=jnp.bfloat16, params=params)
    assert 1e-4 < relative_error(result, pair.theirs_with_guidance()) < BFLOAT16


def test_every_condition_matters(pair: Pair) -> None:
    """The pose and the face of the last frames alone change the result."""
    x, text = pair.x, pair.text
    result = pair.ours(x, text)
    pose, video = pair.pose.copy(), pair.faces.copy()
    pose[:, -1] *= -1
    video[-1] = 255 - video[-1]
    assert relative_error(pair.ours(x, text, pose=pose), result) > 1e-3
    assert relative_error(pair.ours(x, text, video=video), result) > 20 * FLOAT32


@pytest.mark.parametrize("layer", [0, 1])
def test_every_adapter_matters(pair: Pair, layer: int) -> None:
    params = jax.tree.map(np.array, pair.params)
    params["face_adapter"]["to_out"]["weight"][layer] = 0
    x, text = pair.x, pair.text
    assert relative_error(pair.ours(x, text, params=params), pair.ours(x, text)) > 1e-3


@pytest.mark.parametrize("shape", [(8, 16, 16, 3), (9, 32, 32, 3), None], ids=str)
def test_a_face_video_that_does_not_fit(pair: Pair, shape: tuple[int, ...] | None) -> None:
    video = None if shape is None else np.zeros(shape, np.uint8)
    model = bind(pair.module, pair.params)
    with pytest.raises(ValueError, match=re.escape(str((9, 16, 16, 3)))):
        model.prepare(pair.text, LATENT, jnp.float32, image_tokens=pair.tokens, face_video=video)


def test_parameters_and_their_dtypes() -> None:
    """Every key of the reference has its place (the naive converter says so), and norms stay in float32."""
    stored = abstract_params(AnimateTransformer(config()))
    assert stored["motion_encoder"]["motion_synthesis_weight"].dtype == jnp.float32
    assert stored["face_adapter"]["norm_q"]["weight"].dtype == jnp.float32
    assert stored["face_adapter"]["to_q"]["weight"].shape == (2, 48, 48)
    assert stored["motion_encoder"]["conv_out"]["weight"].dtype == jnp.bfloat16
    assert stored["face_encoder"]["conv2"]["weight"].dtype == jnp.bfloat16
