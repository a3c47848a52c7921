"""The motion encoder, the face encoder and the face adapter against diffusers', every parameter random."""

from __future__ import annotations

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

from helpers.animate_reference import SIZES, as_reference, config, faces, randomised
from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import relative_error
from wanbuild.config import parse_config
from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer_rules import FACE_RULES, MOTION_RULES
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.attention import blocked_attention
from wanbuild.models.face import FaceAdapter, FaceEncoder
from wanbuild.models.motion_encoder import MotionEncoder, blur, orthonormal
from wanbuild.models.params import bind, stacked
from wanbuild.models.sequence import TokenAttention
from wanrun.errors import SourceError

FLOAT32 = 2e-6  # seen: 3e-7


class Part(nnx.Module):
    """A part under the name that it has in the transformer, for its mapping rules."""

    def __init__(self, name: str, module: nnx.Module) -> None:
        setattr(self, name, module)


class Pair:
    """A reference module, and ours with its parameters."""

    def __init__(
        self, name: str, prefix: str, reference: Any, module: Any, rules: Sequence[Rule], seed: int
    ) -> None:
        state = {prefix + key: value for key, value in randomised(reference.eval(), seed).items()}
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
        return reference(as_reference(video)).numpy()


@pytest.mark.parametrize(("size", "frames"), [(16, 9), (32, 5), (64, 1), (4, 3)])
def test_motion_encoder(size: int, frames: int) -> None:
    pair, video = motion_pair(size), faces(0, frames, size)
    result, reference = pair.ours(video), motions(pair.reference, video)
    assert result.dtype == jnp.float32 and result.shape == (frames, SIZES["motion_encoder_dim"])
    assert relative_error(result, reference) < FLOAT32
    # It depends on the faces: a corner of each is enough.
    changed = video.copy()
    changed[:, -1, 0] ^= 255
    assert relative_error(pair.ours(changed), reference) > 20 * FLOAT32


def test_published_channels() -> None:
    """The table that published configs leave out, on faces of 64 pixels for the time it takes."""
    pair = motion_pair(64, motion_encoder_channel_sizes=None)
    video = faces(1, 1, 64)
    result = pair.ours(video)
    assert relative_error(result, motions(pair.reference, video)) < FLOAT32


@pytest.mark.parametrize("batch", [1, 3, 7, 8])
def test_batches_of_faces(batch: int) -> None:
    """Seven faces in batches that they fill, or do not."""
    pair, video = motion_pair(motion_encoder_batch_size=batch), faces(2, 7, 16)
    result = pair.ours(video)
    assert relative_error(result, motions(pair.reference, video)) < FLOAT32


@pytest.mark.parametrize("path", ["conv_in/bias", "res_blocks/1/conv_skip/weight", "motion_network/3/bias"])
def test_every_motion_parameter_matters(toy: Pair, path: str) -> None:
    video = faces(3, 2, 16)
    params = jax.tree.map(np.array, toy.params)
    node = params["motion_encoder"]
    for key in path.split("/"):
        node = node[key]
    node[...] = 0
    wrong = toy.ours(video, params)
    assert relative_error(wrong, motions(toy.reference, video)) > 100 * FLOAT32


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
    assert relative_error(result, reference) < FLOAT32  # seen: 7e-7, and 6e-7 of the reference from float64
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
    assert relative_error(result[:, 1:], reference) < FLOAT32


class Adapters:
    """Two adapters of the reference, and our stack of them."""

    def __init__(self) -> None:
        references, state = [], {}
        for index in range(2):
            reference = WanAnimateFaceBlockCrossAttention(48, 2, 24, eps=1e-6, cross_attention_dim_head=24)
            for key, value in randomised(reference.eval(), seed=index).items():
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
    assert relative_error(result, adapters.theirs(index, x, tokens)) < FLOAT32
    assert relative_error(adapters.theirs(index, x, tokens[:, ::-1].copy()), result) > 0.1


def test_face_adapter_in_bfloat16(adapters: Adapters) -> None:
    x, tokens = adapter_inputs(2, 2, 4)
    error = relative_error(adapters.ours(0, x, tokens, jnp.bfloat16), adapters.theirs(0, x, tokens))
    assert 1e-4 < error < 2e-2  # seen: 6e-3; a few roundings of 4e-3 each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inject_face_latents_blocks": 3}, "does not divide num_layers 4"),
        ({"inject_face_latents_blocks": 8}, "does not divide num_layers 4"),
        ({"in_channels": 35}, "latent_channels 16 needs 36"),
        ({"in_channels": None}, "in_channels is None: Expected `int`"),
        ({"latent_channels": None}, "latent_channels is None: Expected `int`"),
        ({"motion_encoder_size": 24}, "not a power of two"),
        ({"motion_encoder_size": 2}, "not a power of two"),
        ({"motion_encoder_size": 128}, "has None for 128 pixels"),
        ({"motion_encoder_size": 2048, "motion_encoder_channel_sizes": None}, "has None for 2048 pixels"),
        ({"motion_encoder_channel_sizes": {"4": 12, "16": 6}}, "has None for 8 pixels"),
        ({"motion_encoder_channel_sizes": {"4": 12, "8": 0, "16": 6}}, "has 0 for 8 pixels"),
        ({"motion_encoder_channel_sizes": {"4": 12, "8": True, "16": 6}}, "has True for 8 pixels"),
        ({"motion_encoder_channel_sizes": {"4": 12, "8": [1], "16": "6"}}, "has '6' for 16 pixels"),
        ({"motion_encoder_channel_sizes": [12, 8, 6]}, "Expected `object"),
        ({"motion_encoder_size": None}, "motion_encoder_size is None"),
        ({"motion_dim": 15}, "more than motion_encoder_dim 14"),
        ({"patch_size": [2, 2, 2]}, "single latent frames"),
        ({"patch_size": []}, "patch_size is []: Expected `array` of length 3"),
        ({"added_kv_proj_dim": None}, "added_kv_proj_dim is None"),
        ({"_class_name": "WanTransformer3DModel"}, "another class"),
        ({"face_dim": 1}, "unknown field face_dim"),
    ],
    ids=str,
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message.replace("[", r"\[")):
        parse_config(AnimateConfig, {**SIZES, **change}, "config.json")


def test_channels_that_are_left_out() -> None:
    given = {name: value for name, value in SIZES.items() if not name.endswith("_channels")}
    parsed = parse_config(AnimateConfig, given, "config.json")
    assert (parsed.in_channels, parsed.latent_channels, parsed.out_channels) == (36, 16, 16)
