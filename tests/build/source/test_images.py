"""Checkpoints that take images and videos: which variant they are of, and what the runtime is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.checkpoint_files import PROCESSOR_FORMS, write_processor
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.published.base_configs import PUBLISHED_IMAGE_PROCESSOR
from wanbuild.source.checkpoint import open_source
from wanbuild.source.image_processor import FILE, ImageProcessorConfig, open_image_processor
from wanbuild.source.match import variant_of
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.table import variants
from wanrun.artifact.model import ImageProcessor
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError

PROCESSOR = f"image_processor/{FILE}"

Change = dict[str, Any]


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """Writes a toy of a variant and changes fields of its files."""

    def make(variant: str, file: str = "model_index.json", change: Change | None = None) -> Path:
        folder = tmp_path / "toy"
        write_toy(folder, variant)
        data = {**json.loads((folder / file).read_text()), **(change or {})}
        (folder / file).write_text(json.dumps(data))
        return folder

    return make


def _variant_of(folder: Path) -> str:
    with open_source(folder) as source:
        return variant_of(source).name


# Variants.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "change"),
    [
        # As the published Wan 2.1 checkpoints list them.
        ("wan2.1-i2v", {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]}),
        ("wan2.1-flf2v", {"image_processor": ["transformers", "CLIPProcessor"]}),
        # As newer releases of diffusers and transformers write them.
        ("wan2.1-i2v", {"image_processor": ["transformers", "CLIPImageProcessorFast"]}),
        ("wan2.1-i2v", {"transformer_2": [None, None], "boundary_ratio": None, "expand_timesteps": False}),
        ("wan2.1-vace", {"transformer_2": [None, None], "boundary_ratio": None}),
        ("wan2.2-i2v", {"expand_timesteps": False}),
        # As the reference's pipeline of images saves it.
        (
            "wan2.2-ti2v",
            {
                "_class_name": "WanImageToVideoPipeline",
                "image_encoder": [None, None],
                "image_processor": [None, None],
            },
        ),
    ],
)
def test_other_forms_of_the_index(toy: Callable[..., Path], variant: str, change: Change) -> None:
    assert _variant_of(toy(variant, "model_index.json", change)) == variant


VACE, BASE = "WanVACETransformer3DModel", "WanTransformer3DModel"


@pytest.mark.slow
def test_the_manifest_names_the_transformer_s_class(toy: Callable[..., Path], tmp_path: Path) -> None:
    """Programs are made by it; a config that names none is of the class of model_index.json."""
    folder = toy("wan2.1-vace")
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("_class_name") == VACE
    file.write_text(json.dumps(config))
    manifest = convert(ConvertRequest(folder, tmp_path / "artifact"))
    assert manifest.configs["transformer"] == {**config, "_class_name": VACE}
    # And one of the base's class has keys and a field that this has not.
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "_class_name": "WanPipeline", "transformer": ["diffusers", BASE]})
    )
    with refuses("unreadable", SourceError, what="vace_in_channels"):
        convert(ConvertRequest(folder, tmp_path / "other"))


@pytest.mark.thorough
@pytest.mark.parametrize("variant", variants())
def test_what_the_runtime_is_told(toy: Callable[..., Path], tmp_path: Path, variant: str) -> None:
    model = convert(ConvertRequest(toy(variant), tmp_path / "artifact")).model
    row = variants()[variant]
    face = 16 if variant == "wan2.2-animate" else None
    assert model.variant == variant
    assert model.task == row.task_record(SimpleNamespace(motion_encoder_size=face))
    others = {"wan2.2-ti2v": 32, "helios-mid-wan2.1": 64, "helios-distilled-wan2.1": 64}
    assert model.size_multiple == others.get(variant, 16)
    assert model.leading_latents == (1 if variant == "wan2.2-animate" else 0)
    assert model.options.get("conditioning_scale") == (1.0 if variant.endswith("-vace") else None)
    if row.encoded_images:
        assert model.image_processor == ImageProcessor(
            shortest_edge=47,
            crop=42,
            resample=3,
            rescale_factor=PUBLISHED_IMAGE_PROCESSOR["rescale_factor"],
            mean=tuple(PUBLISHED_IMAGE_PROCESSOR["image_mean"]),
            std=tuple(PUBLISHED_IMAGE_PROCESSOR["image_std"]),
        )
    else:
        assert model.image_processor is None


@pytest.mark.slow
def test_an_image_encoder_with_its_projection(toy: Callable[..., Path], tmp_path: Path) -> None:
    """As the published Wan 2.1 checkpoints have it: it projects the pooled output, which none uses."""
    folder = toy("wan2.1-i2v")
    plain = convert(ConvertRequest(folder, tmp_path / "plain"))
    name = "CLIPVisionModelWithProjection"
    for file, change in (
        ("model_index.json", {"image_encoder": ["transformers", name]}),
        ("image_encoder/config.json", {"architectures": [name], "_attn_implementation_autoset": True}),
    ):
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**data, **change}))
    (weights,) = (folder / "image_encoder").glob("*.safetensors")
    state = load_file(weights)
    save_file({**state, "visual_projection.weight": np.ones((20, 28), np.float32)}, weights)
    projected = convert(ConvertRequest(folder, tmp_path / "projected"))
    encoders = [manifest.components["image_encoder"] for manifest in (plain, projected)]
    assert encoders[0] == encoders[1]


@pytest.mark.slow
def test_the_processor_is_a_file_of_the_source(toy: Callable[..., Path], tmp_path: Path) -> None:
    folder = toy("wan2.1-i2v")
    with open_source(folder) as source:
        assert PROCESSOR in source.files()
    first = convert(ConvertRequest(folder, tmp_path / "a"))
    data = json.loads((folder / PROCESSOR).read_text())
    (folder / PROCESSOR).write_text(json.dumps({**data, "image_mean": [0.5, 0.5, 0.5]}))
    second = convert(ConvertRequest(folder, tmp_path / "b"))
    assert second.model.image_processor.mean == (0.5, 0.5, 0.5)
    assert first.content_digest != second.content_digest


# The image processor's settings.


def test_a_processor_as_published(tmp_path: Path) -> None:
    assert (
        open_image_processor(write_processor(tmp_path, dict(PUBLISHED_IMAGE_PROCESSOR)))
        == ImageProcessorConfig()
    )


@pytest.mark.parametrize("content", PROCESSOR_FORMS)
def test_older_and_newer_forms(tmp_path: Path, content: Change) -> None:
    """What is left out has the class's default: CLIP's mean and deviation, and 1/255."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    expected = ImageProcessorConfig(50, 42, mean, std, 1 / 255)
    assert open_image_processor(write_processor(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        *(
            ({field: value}, "unreadable", (field, value))
            for field, value in (
                *(("resample", 2), ("do_center_crop", False), ("do_resize", False), ("do_rescale", False)),
                *(("do_normalize", 1), ("do_convert_rgb", None), ("do_pad", True), ("offset", True)),
                *(("crop_size", [224, 224]), ("image_mean", [0.5, 0.5]), ("image_std", [0.5, 0.0, 0.5])),
                *(("rescale_factor", -1.0), ("size", None)),
            )
        ),
        ({"size": {"height": 224, "width": 224}}, "unsupported", ("size", "shortest_edge")),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}}, "unsupported", ("size",)),
        ({"size": {"shortest_edge": "224"}}, "unreadable", ("size", "'224'")),
        ({"size": 200}, "unreadable", ("crop_size", "size")),
        ({"crop_size": {"height": 224, "width": 200}}, "unsupported", ("height and width",)),
        ({"crop_size": {"height": 0, "width": 0}}, "unreadable", ("crop_size", 0)),
        ({"image_processor_type": "SiglipImageProcessor"}, "unsupported", ("image_processor_type", "Siglip")),
    ],
)
def test_a_processor_that_does_something_else(
    tmp_path: Path, change: Change, code: ErrorCode, named: tuple[object, ...]
) -> None:
    folder = write_processor(tmp_path, {**PUBLISHED_IMAGE_PROCESSOR, **change})
    with pytest.raises(SourceError) as caught:
        open_image_processor(folder)
    assert caught.value.code == code, caught.value
    assert all(str(value) in str(caught.value) for value in named), caught.value
