"""Toy checkpoints: the reference loads and runs them, and their tensors are named and shaped as its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer

from helpers.published_shapes import diffusers_class, reference_shapes
from helpers.reference_models import relative_error
from wanbuild.check.reference_pipeline import Made, Reference
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.source.checkpoint import open_source
from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanbuild.toy.toy_tokenizer import vocabulary
from wanbuild.toy.toy_weights import Stored
from wanrun.media.inputs import Media
from wanrun.replay.samples import sample_mask

OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("wan2.1-t2v", "transformer", {"in_channels": 48, "patch_size": [1, 4, 2]}),
    ("wan2.1-t2v", "text_encoder", {"num_heads": 3}),
    ("wan2.1-t2v", "vae", {"dim_mult": [1, 1, 1, 1], "base_dim": 3}),
    ("wan2.1-t2v", "vae", {"num_res_blocks": 2, "temperal_downsample": [True, False, True]}),
    ("wan2.1-t2v", "vae", {"decoder_base_dim": 10}),
    ("wan2.2-ti2v", "vae", {"num_res_blocks": 2, "temperal_downsample": [True, True, False]}),
    ("wan2.1-i2v", "image_encoder", {"image_size": 47, "num_hidden_layers": 4, "patch_size": 9}),
    (
        "wan2.2-animate",
        "transformer",
        {"motion_encoder_size": 4, "motion_encoder_channel_sizes": {"4": 7}},
    ),
    (
        "wan2.2-animate",
        "transformer",
        {"motion_encoder_size": 64, "motion_encoder_channel_sizes": None},
    ),
    ("wan2.2-animate", "transformer", {"inject_face_latents_blocks": 1, "pos_embed_seq_len": 20}),
    ("wan2.2-animate", "transformer", {"image_dim": None, "added_kv_proj_dim": None}),
    (
        "wan2.2-animate",
        "transformer",
        {"in_channels": 12, "latent_channels": 4, "patch_size": [1, 4, 2]},
    ),
]
"""Changes of a toy's config."""


def _configs() -> Iterator[Any]:
    toys = {name: toy.configs for name, toy in TOY_VARIANTS.items()}
    for repository, components in {**PUBLISHED_MODELS, **toys}.items():
        for name, config in components.items():
            yield pytest.param(name, config, id=f"{repository}-{name}")
    for variant, name, change in OTHERS:
        yield pytest.param(name, {**toys[variant][name], **change}, id=f"{variant}-{name}-{min(change)}")


@pytest.mark.thorough
@pytest.mark.parametrize(("component", "config"), list(_configs()))
def test_shapes_are_the_reference_s(component: str, config: Mapping[str, Any]) -> None:
    shapes = component_shapes(component, config)
    assert shapes == reference_shapes(component, config)
    assert list(shapes) == sorted(shapes)


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


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("variant", TOY_VARIANTS)
def test_the_reference_uses_every_tensor(tmp_path: Path, variant: str, shards: int) -> None:
    write_toy(tmp_path / "x", variant, stored=Stored(shards=shards), seed=2)
    with open_source(tmp_path / "x") as source:
        for name, component in source.components.items():
            of_text = name.endswith("_encoder")
            cls = (
                getattr(transformers, component.class_name)
                if of_text
                else diffusers_class(component.class_name)
            )
            state = _load(cls, tmp_path / "x" / name).state_dict()
            for key in component.tensors:
                # transformers 5 drops a prefix that published files have
                value = state[key.removeprefix("vision_model.")]
                assert torch.equal(value, torch.from_numpy(component.array(key).copy())), key


WIDTH, HEIGHT, FRAMES = 64, 48, 9
PROMPT, ANOTHER = "a cat walks on the grass", "a red dog runs at night"


class Toy:
    """A toy's pipeline; two steps are the least, with which each expert has one."""

    def __init__(self, folder: Path, variant: str) -> None:
        write_toy(folder, variant)
        self.reference = Reference(folder, variant)

    def made(self, prompt: str = PROMPT, seed: int = 0, **options: Any) -> Made:
        given = {"negative_prompt": "blurry", "guidance_scale": 3.0, "num_inference_steps": 2}
        size = {"width": WIDTH, "height": HEIGHT, "num_frames": FRAMES}
        return self.reference.run(prompt=prompt, seed=seed, **{**given, **size, **options})


@pytest.mark.parametrize("variant", ["wan2.1-t2v", "wan2.2-t2v", "wan2.2-ti2v"])
def test_a_video_that_shows_mistakes(tmp_path: Path, variant: str) -> None:
    """A few steps: the video is neither flat nor clipped, moves, and follows prompt, seed and boundary."""
    toy = Toy(tmp_path / "toy", variant)
    assert isinstance(toy.reference.pipe.scheduler, diffusers.UniPCMultistepScheduler)

    def run(prompt: str = PROMPT, seed: int = 0, **options: Any) -> np.ndarray:
        # 999, 856 and 599 at shift 3: the second is the low-noise expert's
        options = {"guidance_scale": 5.0, "height": 32, "num_frames": 5, **options}
        return toy.made(prompt, seed, num_inference_steps=3, **options).frames[0]

    video = run()
    assert video.shape == (5, 32, 64, 3)
    assert 0.1 < video.std() < 0.3  # of 0 to 1; measured 0.17
    assert ((video == 0) | (video == 1)).mean() < 0.05  # measured 0.01
    assert video.std(axis=(0, 1, 2)).min() > 0.1  # each channel
    assert np.abs(np.diff(video, axis=0)).mean() > 0.05  # from frame to frame
    assert np.abs(video - run(ANOTHER)).mean() > 0.01
    assert np.abs(video - run(seed=1)).mean() > 0.05
    if toy.reference.pipe.transformer_2 is not None:
        for options in ({"guidance_scale_2": 1.0}, {"boundary": 0.0}):
            assert np.abs(video - run(**options)).mean() > 0.01


def _image(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Smooth random colours."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def _video(seed: int) -> list[Image.Image]:
    return [_image(1000 * seed + frame, (WIDTH, HEIGHT)) for frame in range(FRAMES)]


def _mask(seed: int) -> list[Image.Image]:
    return sample_mask(WIDTH, HEIGHT, FRAMES)[:: -1 if seed == 9 else 1]


GIVEN: Mapping[str, Mapping[str, Callable[[int], Any]]] = {
    "wan2.1-i2v": {"image": _image},
    "wan2.1-flf2v": {"image": _image, "last_image": _image},
    "wan2.2-i2v": {"image": _image, "last_image": _image},
    "wan2.2-ti2v": {"image": _image},
    "wan2.1-vace": {
        "video": _video,
        "mask": _mask,
        "reference_image": lambda seed: (_image(seed), _image(seed + 50)),
    },
    "wan2.2-animate": {
        "image": _image,
        "pose_video": _video,
        "face_video": _video,
        "background_video": _video,
        "mask_video": _mask,
    },
}
"""What is given to the pipelines, made of a seed."""


@pytest.mark.thorough
@pytest.mark.parametrize("variant", GIVEN)
def test_what_is_given_shows_in_the_result(tmp_path: Path, variant: str) -> None:
    """Each input by itself moves the latents by more than 1 % of them: parity is tested far below it."""
    toy = Toy(tmp_path / "toy", variant)
    given = {name: make(1 + number) for number, (name, make) in enumerate(GIVEN[variant].items())}
    own = {"mode": "replace"} if variant == "wan2.2-animate" else {}

    def run(prompt: str = PROMPT, scale: float = 1.0, **changes: Any) -> np.ndarray:
        options = {} if scale == 1 else {"conditioning_scale": scale}
        return toy.made(prompt, media=Media(**{**given, **own, **changes}), **options).latents

    latents = run()
    assert 0.5 < latents.std() < 2.0
    changes: list[dict[str, Any]] = [{name: make(9)} for name, make in GIVEN[variant].items()]
    if variant == "wan2.1-vace":  # the order of references too
        changes += [{"reference_image": given["reference_image"][::-1]}, {"scale": 0.3}]
    for change in [*changes, {"prompt": ANOTHER}]:
        moved = relative_error(run(**change), latents)
        assert moved > 0.01, f"{[*change]} moves {moved}"  # measured 0.02 to 0.6
    pipe = toy.reference.pipe
    if pipe.config.get("image_encoder", [None])[0] is not None:
        encode = pipe.encode_image
        pipe.encode_image = lambda images, device: encode(images, device).flip(0)
        moved = relative_error(run(), latents)
        # Keys have no order of their own: two images that are swapped show where they have positions.
        assert moved > 0.01 if variant == "wan2.1-flf2v" else moved == 0
        others = [_image(20), _image(21)]
        pipe.encode_image = lambda images, device: encode(others[: _count(images)], device)
        moved = relative_error(run(), latents)
        assert moved > 0.1, f"image tokens alone move {moved}"  # measured 0.3 to 0.4


def _count(images: Any) -> int:
    return len(images) if isinstance(images, list) else 1
