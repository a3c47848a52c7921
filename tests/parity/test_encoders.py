"""The encoders of text and images against transformers' UMT5 and CLIP, every parameter random."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

from helpers.compiling import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from wanbuild.components import KINDS
from wanbuild.mapping.encoder_rules import CLIP_RULES, UMT5_RULES
from wanbuild.mapping.engine import assign
from wanbuild.models.clip import CLIPImageEncoder
from wanbuild.models.clip_config import ImageEncoderConfig
from wanbuild.models.params import bind
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder, relative_position_buckets
from wanbuild.published.variant_configs import PUBLISHED_IMAGE_ENCODER, TOY_IMAGE_ENCODER
from wanbuild.source.shapes import component_shapes
from wanrun.executables.lowering import lower

KIND = KINDS["image_encoder"]
PREFIX = "vision_model."

CONFIGS: dict[str, Mapping[str, Any]] = {
    "toy": TOY_IMAGE_ENCODER,
    # The reference leaves out the pixels that fill no patch; one layer more, and small heads.
    "pixels left over": {
        **TOY_IMAGE_ENCODER,
        "hidden_size": 24,
        "image_size": 47,
        "layer_norm_eps": 1e-3,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "patch_size": 9,
    },
    "quick": {**TOY_IMAGE_ENCODER, "hidden_act": "quick_gelu"},
    "published sizes": {**PUBLISHED_IMAGE_ENCODER, "num_hidden_layers": 2},
}


def parsed(config: Mapping[str, Any]) -> ImageEncoderConfig:
    return KIND.parse(config, "image_encoder/config.json")


def encode(
    module: CLIPImageEncoder, params: Any, pixels: np.ndarray, dtype: Any, jit: Any = fast_jit
) -> np.ndarray:
    run = jit(lambda params, pixels: bind(module, params)(pixels, dtype))
    tokens = run(params, pixels)
    assert tokens.dtype == dtype
    return np.asarray(tokens.astype(jnp.float32))


@dataclass(frozen=True)
class Reference:
    """What transformers computes in float32, and its state dict without the prefix."""

    config: Mapping[str, Any]
    state: Mapping[str, np.ndarray]
    pixels: np.ndarray
    hidden_states: list[np.ndarray]
    half: np.ndarray  # hidden_states[-2] where everything is bfloat16


@functools.cache
def reference(name: str) -> Reference:
    config = CONFIGS[name]
    model = CLIPVisionModel(CLIPVisionConfig(**config)).eval()
    state = {name.removeprefix(PREFIX): value.copy() for name, value in randomise(model, seed=3).items()}
    size = config["image_size"]
    pixels = np.random.default_rng(1).standard_normal((2, size, size, 3)).astype(np.float32)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    with torch.no_grad():
        hidden = [
            x.float().numpy() for x in model(pixel_values=images, output_hidden_states=True).hidden_states
        ]
        half = model.bfloat16()(pixel_values=images.bfloat16(), output_hidden_states=True).hidden_states[-2]
    return Reference(config, state, pixels, hidden, half.float().numpy())


@pytest.fixture(scope="module")
def toy() -> Reference:
    return reference("toy")


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_images(name: str) -> None:
    expected = reference(name)
    config = parsed(expected.config)
    assert len(expected.hidden_states) == config.num_hidden_layers + 1
    module = CLIPImageEncoder(config, jnp.float32)
    params = load_params(expected.state, CLIP_RULES, module)

    tokens = encode(module, params, expected.pixels, jnp.float32)
    assert tokens.shape == (2, config.num_tokens, config.hidden_size)
    # Seen: 4e-7 to 6e-7.
    assert relative_error(tokens, expected.hidden_states[-2]) < 1e-5
    for other in (-1, -3):  # the reference's own layers are far apart, so a wrong one cannot pass
        assert relative_error(tokens, expected.hidden_states[other]) > 0.1
    assert relative_error(tokens[::-1], expected.hidden_states[-2]) > 0.1

    one_by_one = [encode(module, params, expected.pixels[i : i + 1], jnp.float32) for i in range(2)]
    assert relative_error(np.concatenate(one_by_one), tokens) < 2e-6

    half = CLIPImageEncoder(config, jnp.bfloat16)
    error = relative_error(
        encode(half, load_params(expected.state, CLIP_RULES, half), expected.pixels, jnp.bfloat16),
        expected.hidden_states[-2],
    )
    # Seen: 0.0034 to 0.0046, and 0.0053 to 0.0071 for the reference in bfloat16.
    assert 1e-4 < error < relative_error(expected.half, expected.hidden_states[-2])


def test_activations_differ() -> None:
    """The approximation is not the exact one: taking one for the other would be noticed above."""
    exact, quick = map(reference, ("toy", "quick"))
    assert relative_error(quick.hidden_states[-2], exact.hidden_states[-2]) > 1e-3


def named(state: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """The state dict with the prefix before every key, before none, or before every second one."""
    every = {"published": 1, "transformers 5": len(state) + 1, "mixed": 2}[naming]
    return {
        (f"{PREFIX}{key}" if (index + 1) % every == 0 else key): value
        for index, (key, value) in enumerate(state.items())
    }


@pytest.mark.parametrize("naming", ["published", "transformers 5", "mixed"])
def test_keys_with_and_without_the_prefix(toy: Reference, naming: str) -> None:
    module = CLIPImageEncoder(parsed(toy.config), jnp.float32)
    state = named(toy.state, naming)
    prefixed = sum(key.startswith(PREFIX) for key in state)
    assert prefixed == {"published": len(state), "transformers 5": 0, "mixed": len(state) // 2}[naming]
    assignments, problems = assign(
        CLIP_RULES, {key: value.shape for key, value in state.items()}, module, "image_encoder"
    )
    assert problems == []
    assert sorted(fill.key for item in assignments for fill in item.fills) == sorted(state)
    tokens = encode(module, load_params(state, CLIP_RULES, module), toy.pixels, jnp.float32)
    assert relative_error(tokens, toy.hidden_states[-2]) < 1e-5


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_saved_position_ids_are_left_out(toy: Reference, prefix: str) -> None:
    """Files of transformers before 4.31 hold this buffer, of int64."""
    module = CLIPImageEncoder(parsed(toy.config), jnp.float32)
    state = {f"{prefix}{key}": value for key, value in toy.state.items()}
    whole = {**state, f"{prefix}embeddings.position_ids": np.arange(10)[None]}
    shapes = {key: value.shape for key, value in whole.items()}
    assignments, problems = assign(CLIP_RULES, shapes, module, "image_encoder")
    assert problems == []
    assert {fill.key for item in assignments for fill in item.fills} == state.keys()
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(whole, CLIP_RULES, module),
        load_params(state, CLIP_RULES, module),
    )


def test_a_checkpoint_that_was_saved_with_its_projection(tmp_path: Path) -> None:
    model = CLIPVisionModelWithProjection(CLIPVisionConfig(**TOY_IMAGE_ENCODER)).eval()
    state = randomise(model, seed=5)
    assert [key for key in state if not key.startswith(PREFIX)] == ["visual_projection.weight"]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["CLIPVisionModelWithProjection"]
    module = CLIPImageEncoder(parsed(config), jnp.float32)
    assert assign(CLIP_RULES, {key: x.shape for key, x in state.items()}, module, "image_encoder")[1] == []
    pixels = np.random.default_rng(1).standard_normal((1, 42, 42, 3)).astype(np.float32)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    with torch.no_grad():
        hidden = model(pixel_values=images, output_hidden_states=True).hidden_states[-2].numpy()
    tokens = encode(module, load_params(state, CLIP_RULES, module), pixels, jnp.float32)
    assert relative_error(tokens, hidden) < 1e-5


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("visual_projection.bias", "unexpected key visual_projection.bias is not a part of this model"),
        ("model.vision_model.pre_layrnorm.bias", "is not a part of this model"),
        ("pre_layrnorm.bias", "pre_layrnorm.bias both fill pre_norm/bias"),
        ("encoder.layers.3.mlp.fc1.bias", "the config says 3 layers"),
    ],
)
def test_other_keys_are_refused(key: str, problem: str) -> None:
    shapes = {**component_shapes("image_encoder", TOY_IMAGE_ENCODER), key: (28,)}
    module = CLIPImageEncoder(parsed(TOY_IMAGE_ENCODER))
    (found,) = assign(CLIP_RULES, shapes, module, "image_encoder")[1]
    assert problem in found


def poisoned(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with NaN in everything that comes after hidden_states[-2]."""
    copied = jax.tree.map(np.array, dict(params))
    for leaf in jax.tree.leaves(copied["blocks"]):
        leaf[-1] = np.nan
    for leaf in jax.tree.leaves(copied["post_norm"]):
        leaf[...] = np.nan
    return copied


def as_bits(tree: Any) -> Any:
    """What a program for the CPU is given: bfloat16 weights as uint16."""
    return jax.tree.map(lambda x: x.view(np.uint16) if x.dtype == jnp.bfloat16 else x, tree)


def test_the_last_layer_is_an_argument_that_is_not_read(toy: Reference) -> None:
    module = CLIPImageEncoder(parsed(toy.config), jnp.bfloat16)
    params = load_params(toy.state, CLIP_RULES, module)
    tokens = encode(module, params, toy.pixels, jnp.bfloat16, jax.jit)  # to the bit: as a program is compiled
    assert np.isfinite(tokens).all()
    np.testing.assert_array_equal(encode(module, poisoned(params), toy.pixels, jnp.bfloat16), tokens)

    # As a program: exported, serialized and lowered as the runtime does, with every parameter passed.
    def encode_image(weights: Any, pixels: jax.Array) -> dict[str, jax.Array]:
        return {"image_tokens": bind(module, weights)(pixels, jnp.bfloat16)}

    arguments = (as_bits(poisoned(params)), toy.pixels)
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    data = bytes(export.export(jax.jit(encode_image))(*avals).serialize())
    compiled = lower(data, "encode_image", (), jax.devices("cpu")[0]).compile()
    result = compiled(*arguments)["image_tokens"].astype(jnp.float32)
    np.testing.assert_array_equal(result, tokens)


def test_no_copy_of_the_stacked_weights() -> None:
    config = ImageEncoderConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        hidden_act="gelu",
    )
    module = CLIPImageEncoder(config, jnp.bfloat16)
    rng = np.random.default_rng(0)
    shapes = component_shapes("image_encoder", vars(config))
    state = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
    params = as_bits(load_params(state, CLIP_RULES, module))
    pixels = rng.standard_normal((1, 28, 28, 3), np.float32)
    run = jax.jit(lambda params, pixels: bind(module, params)(pixels, jnp.bfloat16))
    memory = run.lower(params, pixels).compile().memory_analysis()
    stack = sum(leaf.nbytes for leaf in jax.tree.leaves(params["blocks"]))
    # Seen: 0.08 of the stack, one layer of it; a copy is all of it.
    assert memory.temp_size_in_bytes < stack / 3


def test_pixels_of_another_size(toy: Reference) -> None:
    module = CLIPImageEncoder(parsed(toy.config), jnp.float32)
    params = load_params(toy.state, CLIP_RULES, module)
    for shape in ((1, 42, 41, 3), (1, 56, 56, 3), (1, 3, 42, 42)):
        with pytest.raises(ValueError, match="42 x 42"):
            bind(module, params)(jnp.zeros(shape), jnp.float32)


def test_the_config_that_transformers_saves(tmp_path: Path) -> None:
    CLIPVisionModel(CLIPVisionConfig(**TOY_IMAGE_ENCODER)).save_pretrained(tmp_path)
    assert parsed(json.loads((tmp_path / "config.json").read_text())) == parsed(TOY_IMAGE_ENCODER)


def test_a_config_that_names_no_activation() -> None:
    """transformers leaves a default out of the file, and its default is not what Wan's encoder has."""
    config = {name: value for name, value in TOY_IMAGE_ENCODER.items() if name != "hidden_act"}
    assert CLIPVisionConfig(**config).hidden_act == "quick_gelu"
    assert parsed(config).hidden_act == "quick_gelu"


@pytest.mark.thorough
@pytest.mark.parametrize(("buckets", "max_distance"), [(8, 128), (32, 128), (16, 40)])
def test_texts(buckets: int, max_distance: int) -> None:
    config = UMT5Config(
        vocab_size=300,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    reference = UMT5EncoderModel(config).eval()
    state = randomise(reference, seed=buckets)
    state = {key: value for key, value in state.items() if key != "encoder.embed_tokens.weight"}
    module = UMT5Encoder(TextEncoderConfig(300, 32, 8, 37, 3, 4, buckets, max_distance), jnp.float32)
    params = load_params(state, UMT5_RULES, module)

    rng = np.random.default_rng(0)
    ids = rng.integers(2, 300, (3, 512)).astype(np.int32)
    mask = (np.arange(512) < np.array([[1], [37], [512]])).astype(np.int32)
    with torch.no_grad():
        hidden = reference(torch.from_numpy(ids).long(), torch.from_numpy(mask)).last_hidden_state.numpy()

    run = fast_jit(lambda p, i, m: bind(module, p)(i, m, jnp.float32))
    embeddings = np.asarray(run(params, ids, mask))
    # Seen: 2e-6, of which the reference's own distance from float64 is 1.6e-6.
    assert relative_error(embeddings, hidden * mask[..., None]) < 1e-5
    assert not embeddings[mask == 0].any()

    one_by_one = np.concatenate([np.asarray(run(params, ids[i : i + 1], mask[i : i + 1])) for i in range(3)])
    assert relative_error(one_by_one, embeddings) < 2e-6

    half = fast_jit(lambda p, i, m: bind(module, p)(i, m, jnp.bfloat16))(params, ids, mask)
    assert 1e-4 < relative_error(half, hidden * mask[..., None]) < 5e-2  # three layers of bf16 roundings


def test_buckets_by_hand() -> None:
    """Eight buckets: distances 0, 1, then logarithmic ones, the keys after the query in the upper half."""
    table = relative_position_buckets(6, num_buckets=8, max_distance=16)
    #                        -5 -4 -3 -2 -1  0  1  2  3  4  5
    assert table.tolist() == [2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6]
