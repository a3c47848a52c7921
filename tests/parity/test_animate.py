"""Animate's transformer and its parts against diffusers', every parameter random."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateFaceBlockCrossAttention,
    WanAnimateFaceEncoder,
    WanAnimateMotionEncoder,
)
from flax import nnx

from helpers.compiling import fast_jit
from helpers.naive import load_params
from helpers.reference_models import FACES, IMAGES, SIZES, Transformers, normal, randomise, relative_error
from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer_rules import FACE_RULES, MOTION_RULES
from wanbuild.models.animate import AnimateTransformer
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.attention import blocked_attention
from wanbuild.models.face import FaceAdapter, FaceEncoder
from wanbuild.models.motion_encoder import MotionEncoder, blur, orthonormal
from wanbuild.models.params import abstract_params, bind, stacked
from wanbuild.models.sequence import TokenAttention

FLOAT32 = 5e-6  # seen: 4e-7; a pose or a face that is left out is worth 1e-2 and more
PART = 2e-6  # of a part; seen: 3e-7
BFLOAT16 = 2e-2  # seen: 7e-3
LATENT = (4, 4, 6)  # the image's frame, and three of nine frames
FRAMES = 9
TIMESTEP = 40  # at larger ones an ulp of one of the 32 frequencies that the embedding has is worth 2e-6


def config(**changes: Any) -> AnimateConfig:
    return AnimateConfig(**{**SIZES, **IMAGES, **FACES, **changes})


def faces(seed: int, frames: int, size: int) -> np.ndarray:
    """Random pixels, uint8 (F, S, S, 3)."""
    return np.random.default_rng((seed, frames, size)).integers(0, 256, (frames, size, size, 3), np.uint8)


def as_reference(video: np.ndarray) -> np.ndarray:
    """uint8 (F, S, S, 3) to float32 (F, 3, S, S) in [-1, 1], as diffusers' VideoProcessor has it."""
    return (video.astype(np.float32) / 255).transpose(0, 3, 1, 2) * 2 - 1


class Whole(Transformers):
    """The transformer, and inputs for two prompts."""

    def __init__(self) -> None:
        super().__init__("animate", seed=7)
        self.x, self.text = normal(1, 2, 16, *LATENT), normal(2, 2, 512, 32)
        self.channels, self.pose = normal(4, 20, *LATENT), normal(5, 16, LATENT[0] - 1, *LATENT[1:])
        self.tokens, self.faces = normal(3, 1, 10, 40), faces(6, FRAMES, FACES["motion_encoder_size"])

    def made(self, text: Any = None, pose: Any = None, video: Any = None, **how: Any) -> np.ndarray:
        text = self.text if text is None else text
        condition = {"channels": self.channels, "pose": self.pose if pose is None else pose}
        inputs = {"image_tokens": self.tokens, "face_video": self.faces if video is None else video}
        return self.ours(self.x, TIMESTEP, text, condition, inputs, **how)

    def expected(self, x: np.ndarray, text: np.ndarray, blank: bool = False) -> np.ndarray:
        """As the pipeline calls it: the unconditional pass with faces of -1."""
        video, batch = as_reference(self.faces).swapaxes(0, 1)[None], len(x)
        channels = np.broadcast_to(self.channels, (batch, *self.channels.shape))
        return self.theirs(
            np.concatenate([x, channels], axis=1),
            TIMESTEP,
            text,
            encoder_hidden_states_image=self.tokens.repeat(batch, axis=0),
            pose_hidden_states=self.pose[None].repeat(batch, axis=0),
            face_pixel_values=(video * 0 - 1 if blank else video).repeat(batch, axis=0),
        )

    def expected_with_guidance(self) -> np.ndarray:
        """The first video with the first prompt, and the second with the negative one."""
        conditional = self.expected(self.x[:1], self.text[:1])
        return np.concatenate([conditional, self.expected(self.x[1:], self.text[1:], blank=True)])


@pytest.fixture(scope="module")
def whole() -> Whole:
    return Whole()


def test_one_prompt(whole: Whole) -> None:
    """Two videos of one prompt, which share its face; with image tokens padded, as on a TPU."""
    text = whole.text[:1]
    reference = whole.expected(whole.x, text.repeat(2, axis=0))
    assert relative_error(whole.made(text, multiple=128), reference) < FLOAT32


def test_guidance(whole: Whole) -> None:
    """The second prompt is the negative one, and its face is black. In bfloat16 weights are passed as uint16,
    as a CPU program takes them.
    """
    reference, result = whole.expected_with_guidance(), whole.made()
    assert relative_error(result, reference) < FLOAT32
    with_a_face = whole.expected(whole.x[1:], whole.text[1:])
    assert relative_error(result[1:], with_a_face) > 100 * FLOAT32

    def bits(x: np.ndarray, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        rounded = np.asarray(jnp.asarray(x, leaf.dtype))
        return rounded.view(np.uint16) if leaf.dtype == jnp.bfloat16 else rounded

    params = jax.tree.map(bits, whole.params, abstract_params(AnimateTransformer(config())))
    result = whole.made(dtype=jnp.bfloat16, params=params)
    assert 1e-4 < relative_error(result, reference) < BFLOAT16


def test_every_condition_matters(whole: Whole) -> None:
    """The pose and the face of the last frames alone change the result, and so does each adapter."""
    result = whole.made()
    pose, video = whole.pose.copy(), whole.faces.copy()
    pose[:, -1] *= -1
    video[-1] = 255 - video[-1]
    assert relative_error(whole.made(pose=pose), result) > 1e-3
    assert relative_error(whole.made(video=video), result) > 20 * FLOAT32
    for layer in (0, 1):
        params = jax.tree.map(np.array, whole.params)
        params["face_adapter"]["to_out"]["weight"][layer] = 0
        assert relative_error(whole.made(params=params), result) > 1e-3


@pytest.mark.parametrize("shape", [(8, 16, 16, 3), (9, 32, 32, 3), None], ids=str)
def test_a_face_video_that_does_not_fit(whole: Whole, shape: tuple[int, ...] | None) -> None:
    video = None if shape is None else np.zeros(shape, np.uint8)
    model = bind(whole.module, whole.params)
    with pytest.raises(ValueError, match=re.escape(str((9, 16, 16, 3)))):
        model.prepare(whole.text, LATENT, jnp.float32, image_tokens=whole.tokens, face_video=video)


def test_parameters_and_their_dtypes() -> None:
    """Every key of the reference has its place (the naive converter says so), and norms stay in float32."""
    stored = abstract_params(AnimateTransformer(config()))
    assert stored["motion_encoder"]["motion_synthesis_weight"].dtype == jnp.float32
    assert stored["face_adapter"]["norm_q"]["weight"].dtype == jnp.float32
    assert stored["face_adapter"]["to_q"]["weight"].shape == (2, 48, 48)
    assert stored["motion_encoder"]["conv_out"]["weight"].dtype == jnp.bfloat16
    assert stored["face_encoder"]["conv2"]["weight"].dtype == jnp.bfloat16


class Part(nnx.Module):
    """A part under the name that it has in the transformer, for its mapping rules."""

    def __init__(self, name: str, module: nnx.Module) -> None:
        setattr(self, name, module)


class Pair:
    """A reference module, and ours with its parameters."""

    def __init__(
        self, name: str, prefix: str, reference: Any, module: Any, rules: Sequence[Rule], seed: int
    ) -> None:
        state = {prefix + key: value for key, value in randomise(reference.eval(), seed).items()}
        self.reference, self.name, self.part = reference, name, Part(name, module)
        self.params = load_params(state, rules, self.part)
        self.run = fast_jit(lambda params, x: getattr(bind(self.part, params), self.name)(x))

    def ours(self, x: np.ndarray, params: Any = None) -> np.ndarray:
        return np.asarray(self.run(self.params if params is None else params, x))


def motion_pair(size: int = 16, **changes: Any) -> Pair:
    options = config(motion_encoder_size=size, **changes)
    reference = WanAnimateMotionEncoder(
        size,
        options.motion_style_dim,
        options.motion_dim,
        options.motion_encoder_dim,
        channels=options.motion_encoder_channel_sizes,
    )
    module = MotionEncoder(options, jnp.float32, jnp.float32)
    return Pair("motion_encoder", "motion_encoder.", reference, module, MOTION_RULES, seed=size)


@pytest.fixture(scope="module")
def toy() -> Pair:
    return motion_pair()


def motions(reference: Any, video: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.from_numpy(as_reference(video))).numpy()


@pytest.mark.parametrize(("size", "frames"), [(16, 9), (32, 5), (64, 1), (4, 3)])
def test_motion_encoder(size: int, frames: int) -> None:
    pair, video = motion_pair(size), faces(0, frames, size)
    result, reference = pair.ours(video), motions(pair.reference, video)
    assert result.dtype == jnp.float32 and result.shape == (frames, FACES["motion_encoder_dim"])
    assert relative_error(result, reference) < PART
    # It depends on the faces: a corner of each is enough.
    changed = video.copy()
    changed[:, -1, 0] ^= 255
    assert relative_error(pair.ours(changed), reference) > 20 * PART


@pytest.mark.parametrize(
    ("size", "frames", "changes"),
    [
        (64, 1, {"motion_encoder_channel_sizes": None}),  # what published configs leave out
        *((16, 7, {"motion_encoder_batch_size": batch}) for batch in (1, 3, 7, 8)),
    ],
    ids=str,
)
def test_published_channels_and_batches(size: int, frames: int, changes: dict[str, Any]) -> None:
    """Of seven faces, in batches that they fill, or do not."""
    pair, video = motion_pair(size, **changes), faces(2, frames, size)
    assert relative_error(pair.ours(video), motions(pair.reference, video)) < PART


@pytest.mark.parametrize("path", ["conv_in/bias", "res_blocks/1/conv_skip/weight", "motion_network/3/bias"])
def test_every_motion_parameter_matters(toy: Pair, path: str) -> None:
    video = faces(3, 2, 16)
    params = jax.tree.map(np.array, toy.params)
    node = params["motion_encoder"]
    for key in path.split("/"):
        node = node[key]
    node[...] = 0
    wrong = toy.ours(video, params)
    assert relative_error(wrong, motions(toy.reference, video)) > 100 * PART


compiled_orthonormal = jax.jit(orthonormal)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(512, 20), (14, 5), (6, 6), (3, 1)])
@pytest.mark.parametrize("kind", ["normal", "uneven", "orthonormal", "triangular"])
def test_orthonormal(shape: tuple[int, int], kind: str) -> None:
    """The very columns of the reference, signs included."""
    matrix = np.random.default_rng(shape).standard_normal(shape)
    if kind == "uneven":
        matrix *= np.logspace(-2, 2, shape[1])
    elif kind == "orthonormal":
        matrix = np.linalg.qr(matrix)[0]
    elif kind == "triangular":
        matrix = np.triu(matrix)  # nothing below the diagonal, so that no column is reflected
    matrix = matrix.astype(np.float32)
    result = np.asarray(compiled_orthonormal(matrix))
    reference = torch.linalg.qr(torch.from_numpy(matrix))[0].numpy()
    assert relative_error(result, reference) < PART  # seen: 7e-7, and 6e-7 of the reference from float64
    np.testing.assert_allclose(result.T @ result, np.eye(shape[1]), atol=1e-6)  # seen: 3e-7


def test_no_library_is_called(toy: Pair) -> None:
    """A call of LAPACK in a program would make the runtime import SciPy."""
    exported = jax.export.export(toy.run)(toy.params, faces(4, 2, 16))
    assert "custom_call" not in exported.mlir_module()


@pytest.mark.parametrize(("padding", "stride", "size"), [(2, 1, 9), (1, 2, 8), (1, 2, 7)])
def test_blur(padding: int, stride: int, size: int) -> None:
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
    kernel = torch.outer(taps, taps)
    x = np.random.default_rng(size).standard_normal((2, size, size, 3)).astype(np.float32)
    reference = torch.nn.functional.conv2d(
        torch.from_numpy(x).permute(0, 3, 1, 2),
        (kernel / kernel.sum()).expand(3, 1, 4, 4),
        padding=padding,
        stride=stride,
        groups=3,
    )
    result = blur(jnp.asarray(x), padding, stride)
    assert relative_error(result, reference.permute(0, 2, 3, 1).numpy()) < 1e-6  # sums of 16 terms


@pytest.fixture(scope="module")
def encoder() -> Pair:
    reference = WanAnimateFaceEncoder(14, 48, hidden_dim=20, num_heads=3)
    module = FaceEncoder(config(), jnp.float32)
    return Pair("face_encoder", "face_encoder.", reference, module, FACE_RULES, seed=1)


@pytest.mark.parametrize("frames", [1, 5, 9, 13, 17, 77])
def test_face_encoder(encoder: Pair, frames: int) -> None:
    vectors = np.random.default_rng(frames).standard_normal((2, frames, 14)).astype(np.float32)
    result = encoder.ours(vectors)
    with torch.no_grad():
        reference = encoder.reference(torch.from_numpy(vectors)).numpy()
    assert result.shape == (2, (frames - 1) // 4 + 2, 4, 48)
    assert not np.any(result[:, 0])
    assert relative_error(result[:, 1:], reference) < PART


class Adapters:
    """Two adapters of the reference, and our stack of them."""

    def __init__(self) -> None:
        references, state = [], {}
        for index in range(2):
            reference = WanAnimateFaceBlockCrossAttention(48, 2, 24, eps=1e-6, cross_attention_dim_head=24)
            for key, value in randomise(reference.eval(), seed=index).items():
                state[f"face_adapter.{index}.{key}"] = value
            references.append(reference)
        self.references = references
        self.part = Part("face_adapter", stacked(FaceAdapter(config(), jnp.float32, jnp.float32), 2))
        self.params = load_params(state, FACE_RULES, self.part)

        self._run = fast_jit(self._apply, static_argnums=3)

    def _apply(self, index: Any, x: Any, tokens: Any, dtype: Any) -> Any:
        graphdef, state = nnx.split(bind(self.part, self.params).face_adapter)
        adapter = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], state))
        attention = TokenAttention(blocked_attention, x.shape[1])
        return adapter(x.astype(dtype), adapter.kv(tokens, dtype), attention)

    def ours(self, index: int, x: Any, tokens: Any, dtype: Any = jnp.float32) -> np.ndarray:
        return np.asarray(self._run(index, x, tokens, dtype))

    def theirs(self, index: int, x: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        tokens = np.repeat(tokens, len(x) // len(tokens), axis=0)
        with torch.no_grad():
            return self.references[index](torch.from_numpy(x), torch.from_numpy(tokens)).numpy()


@pytest.fixture(scope="module")
def adapters() -> Adapters:
    return Adapters()


def adapter_inputs(batch: int, prompts: int, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of which there are six in each latent frame, and face tokens, the first frame's zero."""
    rng = np.random.default_rng((batch, prompts, frames))
    x = rng.standard_normal((batch, 6 * frames, 48)).astype(np.float32)
    tokens = rng.standard_normal((prompts, frames, 4, 48)).astype(np.float32)
    tokens[:, 0] = 0
    return x, tokens


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("batch", "prompts", "frames"), [(1, 1, 2), (2, 2, 4), (6, 2, 3)])
def test_face_adapter(adapters: Adapters, index: int, batch: int, prompts: int, frames: int) -> None:
    """One video, a video with and without guidance, and three videos of each."""
    x, tokens = adapter_inputs(batch, prompts, frames)
    result = adapters.ours(index, x, tokens)
    assert result.dtype == jnp.float32
    assert relative_error(result, adapters.theirs(index, x, tokens)) < PART
    assert relative_error(adapters.theirs(index, x, tokens[:, ::-1].copy()), result) > 0.1


def test_face_adapter_in_bfloat16(adapters: Adapters) -> None:
    x, tokens = adapter_inputs(2, 2, 4)
    error = relative_error(adapters.ours(0, x, tokens, jnp.bfloat16), adapters.theirs(0, x, tokens))
    assert 1e-4 < error < 2e-2  # seen: 6e-3; a few roundings of 4e-3 each
