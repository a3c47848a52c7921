"""Toy checkpoints: the reference loads and runs them, and their tensors are named and shaped as its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from wanbuild.published.settings import (
    PUBLISHED_TEXT_ENCODER,
    PUBLISHED_TRANSFORMERS,
    PUBLISHED_VAE,
    PUBLISHED_VAE_2_2,
)
from wanbuild.source.checkpoint import open_source
from wanbuild.toy.checkpoint import write_toy
from wanbuild.toy.configs import TOY_TEXT_ENCODER, TOY_TRANSFORMER, TOY_VAE, TOY_VAE_2_2, TOY_VARIANTS
from wanbuild.toy.shapes import text_encoder_shapes, transformer_shapes, vae_shapes
from wanbuild.toy.tokenizer import vocabulary
from wanbuild.toy.weights import Stored

Shapes = dict[str, tuple[int, ...]]


def _reference_shapes(make: Callable[[], Any]) -> Shapes:
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in make().state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [
        TOY_TRANSFORMER,
        *PUBLISHED_TRANSFORMERS.values(),
        {**TOY_TRANSFORMER, "in_channels": 48, "patch_size": [1, 4, 2]},
    ],
    ids=["toy", *PUBLISHED_TRANSFORMERS, "other"],
)
def test_transformer_shapes_are_the_reference_s(config: dict[str, Any]) -> None:
    assert transformer_shapes(config) == _reference_shapes(
        lambda: diffusers.WanTransformer3DModel.from_config(dict(config))
    )


@pytest.mark.parametrize(
    "config",
    [
        TOY_VAE,
        PUBLISHED_VAE,
        {**TOY_VAE, "dim_mult": [1, 1, 1, 1], "base_dim": 3},
        {
            **TOY_VAE,
            "dim_mult": [1, 2, 2, 2],
            "num_res_blocks": 2,
            "temperal_downsample": [True, False, True],
        },
        {**TOY_VAE, "decoder_base_dim": 10, "z_dim": 4},
        TOY_VAE_2_2,
        PUBLISHED_VAE_2_2,
        {**TOY_VAE_2_2, "num_res_blocks": 2, "temperal_downsample": [True, True, False]},
    ],
    ids=["toy", "published", "narrow", "other", "wide decoder", "toy 2.2", "published 2.2", "other 2.2"],
)
def test_vae_shapes_are_the_reference_s(config: dict[str, Any]) -> None:
    known = {name: value for name, value in config.items() if name != "clip_output"}  # warned about
    assert vae_shapes(config) == _reference_shapes(lambda: diffusers.AutoencoderKLWan.from_config(known))


@pytest.mark.parametrize(
    "config",
    [TOY_TEXT_ENCODER, PUBLISHED_TEXT_ENCODER, {**TOY_TEXT_ENCODER, "num_heads": 3}],
    ids=["toy", "umt5-xxl", "heads not over the whole width"],
)
def test_text_encoder_shapes_are_the_reference_s(config: dict[str, Any]) -> None:
    expected = _reference_shapes(lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(**config)))
    # Tied to shared.weight, and left out when saved.
    assert expected.pop("encoder.embed_tokens.weight") == expected["shared.weight"]
    assert text_encoder_shapes(config) == expected


_PROMPTS = [
    "A cat walks on the grass, realistic style.",
    "",
    "  two   spaces\tand a\nline  ",
    "Unknown: 日本語 é ½ ﬁ 🙂, and then a dog!",
    "<pad> in </s> the <unk> middle <s>",
    "~!@#$%^&*()_+{}|:\"<>?`-=[]\\;',./ 0123456789",
    "word " * 600,
]


def test_the_tokenizer_alone_gives_the_reference_s_ids(toy_checkpoint: Path) -> None:
    reference = transformers.T5TokenizerFast.from_pretrained(toy_checkpoint / "tokenizer")
    alone = Tokenizer.from_file(str(toy_checkpoint / "tokenizer" / "tokenizer.json"))
    assert alone.get_vocab_size() == len(reference) == len(vocabulary())
    for prompt in _PROMPTS:
        assert alone.encode(prompt).ids == reference(prompt).input_ids, prompt
    assert alone.encode("").ids == [1]
    padded = reference("a cat", padding="max_length", max_length=512, truncation=True).input_ids
    assert padded == alone.encode("a cat").ids + [0] * (512 - len(alone.encode("a cat").ids))


def _load(cls: Any, folder: Path) -> Any:
    """Loads a component with diffusers or transformers; every key must be used, and none be missing."""
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("variant", TOY_VARIANTS)
def test_the_reference_uses_every_tensor(tmp_path: Path, variant: str, shards: int) -> None:
    write_toy(tmp_path / "x", variant, stored=Stored(shards=shards), seed=2)
    with open_source(tmp_path / "x") as source:
        for name, component in source.components.items():
            library = transformers if name.endswith("_encoder") else diffusers
            state = _load(getattr(library, component.class_name), tmp_path / "x" / name).state_dict()
            for key in component.tensors:
                # transformers 5 drops a prefix that published files have
                value = state[key.removeprefix("vision_model.")]
                assert torch.equal(value, torch.from_numpy(component.array(key).copy())), key


@pytest.mark.parametrize("variant", ["wan2.1-t2v", "wan2.2-t2v", "wan2.2-ti2v"])
def test_the_reference_makes_a_video_that_shows_mistakes(tmp_path: Path, variant: str) -> None:
    """A few steps: the video is neither flat nor clipped, moves, and follows prompt, seed and boundary."""
    write_toy(tmp_path / "toy", variant, seed=0)
    pipeline = diffusers.WanPipeline.from_pretrained(tmp_path / "toy")
    pipeline.set_progress_bar_config(disable=True)
    assert isinstance(pipeline.scheduler, diffusers.UniPCMultistepScheduler)

    def run(prompt: str, seed: int, **options: Any) -> np.ndarray:
        return pipeline(
            prompt=prompt,
            negative_prompt="blurry",
            width=64,
            height=32,
            num_frames=5,
            num_inference_steps=3,  # 999, 856 and 599 at shift 3: the second is the low-noise expert's
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
            **options,
        ).frames[0]

    video = run("A cat walks on the grass.", 0)
    assert video.shape == (5, 32, 64, 3)
    assert 0.1 < video.std() < 0.3  # of 0 to 1; measured 0.17
    assert ((video == 0) | (video == 1)).mean() < 0.05  # measured 0.01
    assert video.std(axis=(0, 1, 2)).min() > 0.1  # each channel
    assert np.abs(np.diff(video, axis=0)).mean() > 0.05  # from frame to frame
    assert np.abs(video - run("a red dog runs at night", 0)).mean() > 0.01
    assert np.abs(video - run("A cat walks on the grass.", 1)).mean() > 0.05
    if pipeline.transformer_2 is not None:
        other = run("A cat walks on the grass.", 0, guidance_scale=5.0, guidance_scale_2=1.0)
        assert np.abs(video - other).mean() > 0.01
        pipeline.register_to_config(boundary_ratio=0.0)
        assert np.abs(video - run("A cat walks on the grass.", 0)).mean() > 0.01
