"""Checkpoints that take images and videos: which variant they are of, and that those that do not fit are
refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.image_processors import PROCESSOR_FORMS, write_processor
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.published.base_configs import PUBLISHED_IMAGE_PROCESSOR
from wanbuild.source.checkpoint import open_source
from wanbuild.source.image_processor import FILE, ImageProcessorConfig, open_image_processor
from wanbuild.source.match import variant_of
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.table import variants
from wanrun.artifact.model import ImageProcessor
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


def _refused(run: Callable[[], object], message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "file", "change", "message"),
    [
        ("wan2.1-i2v", "image_encoder/config.json", {"hidden_size": 24}, "image_dim is 28, not 24"),
        ("wan2.1-i2v", "transformer/config.json", {"image_dim": None}, "transformer has image_dim is False"),
        ("wan2.1-i2v", "transformer/config.json", {"in_channels": 32}, "in_channels, .*, is 32, not 36"),
        ("wan2.1-i2v", "transformer/config.json", {"pos_embed_seq_len": 9}, "wan2.1-flf2v: .* is 9, not 20"),
        ("wan2.1-i2v", PROCESSOR, {"crop_size": 40}, "wan2.1-i2v: image_processor crop_size is 40, not 42"),
        ("wan2.1-flf2v", "image_encoder/config.json", {"image_size": 56}, "pos_embed_seq_len is 20, not 34"),
        ("wan2.1-flf2v", "image_encoder/config.json", {"patch_size": 0}, r"patch_size is \[42, 0\]"),
        ("wan2.1-vace", "transformer/config.json", {"vace_in_channels": 64}, "in_channels is 64, not 96"),
        ("wan2.1-vace", "transformer/config.json", {"in_channels": 36}, "in_channels, .*, is 36, not 16"),
        ("wan2.2-i2v", "transformer/config.json", {"in_channels": 16}, "wan2.2-i2v: .* is 16, not 36"),
        ("wan2.2-animate", "transformer/config.json", {"latent_channels": 4}, "channels is 4, not 16"),
        ("wan2.2-animate", "transformer/config.json", {"pos_embed_seq_len": 20}, "is 20, not None"),
        ("wan2.2-animate", "vae/config.json", {"z_dim": "16"}, "vae z_dim is '16'"),
    ],
)
def test_configs_that_do_not_fit_one_another(
    toy: Callable[..., Path], variant: str, file: str, change: Change, message: str
) -> None:
    folder = toy(variant, file, change)
    _refused(lambda: _variant_of(folder), message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("wan2.1-i2v", {"image_processor": [None, None]}, "not wan2.1-i2v: no image_processor"),
        ("wan2.1-i2v", {"image_encoder": ["transformers", "SiglipVisionModel"]}, "image_encoder is transf"),
        ("wan2.1-i2v", {"image_processor": ["transformers", "SiglipImageProcessor"]}, "image_processor is"),
        ("wan2.1-i2v", {"expand_timesteps": True}, "expand_timesteps is True"),
        ("wan2.2-i2v", {"boundary_ratio": None}, "transformer_2 and no boundary_ratio"),
        ("wan2.1-vace", {"transformer": ["diffusers", "WanTransformer3DModel"]}, "not diffusers.WanVACE"),
        ("wan2.2-animate", {"image_encoder": [None, None]}, "image_encoder is missing"),
    ],
)
def test_an_index_that_lacks_a_part(
    toy: Callable[..., Path], variant: str, change: Change, message: str
) -> None:
    folder = toy(variant, "model_index.json", change)
    _refused(lambda: _variant_of(folder), message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("wan2.1-i2v", {"added_kv_proj_dim": None}, "added_kv_proj_dim is None.* needs 40"),
        ("wan2.1-i2v", {"added_kv_proj_dim": 20}, "added_kv_proj_dim is 20.* needs 40"),
        ("wan2.1-vace", {"vace_layers": [0, 3]}, r"vace_layers is \[0, 3\]"),
        ("wan2.1-vace", {"vace_layers": [1, 2]}, r"vace_layers is \[1, 2\]"),
        ("wan2.1-vace", {"vace_layers": []}, r"vace_layers is \[\]"),
        ("wan2.1-vace", {"vace_layers": [0, 1, 2]}, "vace_blocks"),
        ("wan2.2-animate", {"inject_face_latents_blocks": 3}, "inject_face_latents_blocks is 3"),
        ("wan2.2-animate", {"motion_encoder_size": 24}, "motion_encoder_size is 24"),
        ("wan2.2-animate", {"motion_encoder_size": 32}, "for 32 pixels"),
    ],
)
def test_a_transformer_that_contradicts_itself(
    toy: Callable[..., Path], tmp_path: Path, variant: str, change: Change, message: str
) -> None:
    request = ConvertRequest(toy(variant, "transformer/config.json", change), tmp_path / "artifact")
    _refused(lambda: convert(request), message)
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "file", "change"),
    [
        ("wan2.1-i2v", "transformer", {"added_kv_proj_dim": None}),
        ("wan2.1-vace", "transformer", {"vace_layers": [1, 2]}),
        ("wan2.2-animate", "transformer", {"motion_encoder_size": 24}),
        ("wan2.2-animate", "image_encoder", {"hidden_act": "relu"}),
        ("wan2.1-t2v", "vae", {"temperal_downsample": [True, True, True]}),
    ],
)
def test_a_contradiction_names_the_file_and_what_to_do(
    toy: Callable[..., Path], tmp_path: Path, variant: str, file: str, change: Change
) -> None:
    folder = toy(variant, f"{file}/config.json", change)
    (name,) = change
    message = f"^{folder}/{file}/config.json does not fit together: {name} is .*; use the config.json that"
    _refused(lambda: convert(ConvertRequest(folder, tmp_path / "artifact")), message)


VACE, BASE = "WanVACETransformer3DModel", "WanTransformer3DModel"


@pytest.mark.parametrize(
    ("variant", "pipeline", "named", "message"),
    [
        ("wan2.1-vace", "WanPipeline", BASE, f"another class; expected {BASE}; found '{VACE}'"),
        ("wan2.1-t2v", "WanVACEPipeline", VACE, f"another class; expected {VACE}; found '{BASE}'"),
    ],
)
def test_an_index_of_another_class_than_the_transformer(
    toy: Callable[..., Path], tmp_path: Path, variant: str, pipeline: str, named: str, message: str
) -> None:
    folder = toy(variant, change={"_class_name": pipeline, "transformer": ["diffusers", named]})
    _refused(lambda: convert(ConvertRequest(folder, tmp_path / "artifact")), message)


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
    _refused(lambda: convert(ConvertRequest(folder, tmp_path / "other")), "unknown field vace_in_channels")


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
    ("change", "message"),
    [
        ({"resample": 2}, "resample is 2 and only 3"),
        ({"do_center_crop": False}, "do_center_crop is False and only True"),
        ({"do_resize": False}, "do_resize is False"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_normalize": 1}, "do_normalize is 1 and only True"),
        ({"do_convert_rgb": None}, "do_convert_rgb is None"),
        ({"do_pad": True}, "unknown field do_pad"),
        ({"offset": True}, "unknown field offset"),
        ({"size": {"height": 224, "width": 224}}, "size in .*; expected shortest_edge; found"),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}}, "size in .* is not supported"),
        ({"size": {"shortest_edge": "224"}}, "size is '224': Expected `int`"),
        ({"size": None}, "size is None: Expected `int`"),
        ({"size": 200}, "crop_size of at most size"),
        ({"crop_size": {"height": 224, "width": 200}}, "expected height and width, the same twice"),
        ({"crop_size": {"height": 0, "width": 0}}, "crop_size is 0"),
        ({"crop_size": [224, 224]}, r"crop_size is \[224, 224\]"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean is \[0.5, 0.5\]"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"image_std is .*: Expected `float` >= 1e-12"),
        ({"rescale_factor": -1.0}, "rescale_factor is -1.0: Expected"),
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type .* found 'Siglip"),
    ],
)
def test_a_processor_that_does_something_else(tmp_path: Path, change: Change, message: str) -> None:
    folder = write_processor(tmp_path, {**PUBLISHED_IMAGE_PROCESSOR, **change})
    _refused(lambda: open_image_processor(folder), message)


def test_a_processor_that_cannot_be_read(toy: Callable[..., Path]) -> None:
    folder = toy("wan2.1-i2v")
    (folder / PROCESSOR).write_text("[224]")
    _refused(lambda: open_source(folder), f"{FILE} is not a JSON object")
    (folder / PROCESSOR).unlink()
    _refused(lambda: open_source(folder), f"{FILE} is missing")
