"""The model's record: defaults and the options that a model has, and an image encoder's images."""

from __future__ import annotations

import msgspec
import pytest

from helpers.manifests import plain_model
from helpers.media_files import task_of
from helpers.media_tasks import CLIP, VARIANTS
from wanrun.artifact.model import Chunking, Model


def test_every_model_has_the_common_options() -> None:
    model = plain_model()
    assert model.default_options() == {
        "num_steps": 40,
        "guidance_scale": 4.0,
        "flow_shift": 12.0,
        "solver": "unipc",
        "fps": 16,
        "negative_prompt": "blurry",
    }
    distilled = msgspec.structs.replace(model.defaults, timesteps=(1000, 500.5))
    assert plain_model(defaults=distilled).default_options()["timesteps"] == (1000, 500.5)


def test_some_models_have_options_of_their_own() -> None:
    own = {"guidance_scale_2": 3.0, "boundary": 0.875}
    assert plain_model(options=own).default_options().items() >= own.items()
    animate = plain_model(task=task_of("wan2.2-animate"), image_processor=CLIP)
    assert animate.default_options()["segment_overlap"] == 1
    assert "segment_overlap" not in plain_model().default_options()


def test_an_image_encoder_needs_its_settings() -> None:
    with pytest.raises(ValueError, match="image processor"):
        plain_model(task=task_of("wan2.1-i2v"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_record_is_read_as_it_was_written(variant: str) -> None:
    model = plain_model(variant=variant, task=task_of(variant), image_processor=CLIP)
    data = msgspec.json.encode(model)
    assert msgspec.json.decode(data, type=Model) == model
    assert msgspec.json.encode(msgspec.json.decode(data, type=Model)) == data


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("vae_spatial", 0), ("leading_latents", -1), ("text_width", "32"), ("task", None)],
        *[("num_train_timesteps", number) for number in (1, 10**30, 2**63, 1000.0, True)],
        *[("latent_channels", 2**21), ("size_multiple", 10**30)],
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: object) -> None:
    data = {**msgspec.to_builtins(plain_model()), field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(data, Model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("num_steps", steps) for steps in (0, 10_001, 10**30)],
        *[("flow_shift", shift) for shift in (0, -1.5, 0.0, 1e300)],
        *[("fps", rate) for rate in (0, 0.0, 241, 1e300)],
        *[("guidance_scale", scale) for scale in (10**30, 1e300, "4")],
        *[("solver", name) for name in ("", "UniPC", None)],
        *[("timesteps", values) for values in ([], [0], [-1.0], [10**30], ["900"])],
    ],
)
def test_a_default_out_of_range_is_refused(field: str, value: object) -> None:
    data = msgspec.to_builtins(plain_model())
    data["defaults"][field] = value
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(data, Model, strict=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("boundary", share) for share in (-0.5, 1.5, True, 10**30, "0.5")],
        *[("guidance_scale_2", scale) for scale in (1e300, "3")],
        *[("conditioning_scale", 10**60), ("no_such_option", 1.0), ("", 1)],
    ],
)
def test_an_option_out_of_range_is_refused(name: str, value: object) -> None:
    data = {**msgspec.to_builtins(plain_model()), "options": {name: value}}
    with pytest.raises(msgspec.ValidationError, match="option"):
        msgspec.convert(data, Model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("shortest_edge", 4097), ("crop", 10**30), ("resample", 6)],
        *[("rescale_factor", 0), ("rescale_factor", 1e-300), ("rescale_factor", 1e300)],
        *[("std", [0, 1, 1]), ("std", [1.0, 0.0, 1.0]), ("mean", [0, 0, 10**30]), ("mean", [0.5, 0.5])],
    ],
)
def test_an_image_processor_out_of_range_is_refused(field: str, value: object) -> None:
    data = msgspec.to_builtins(plain_model(image_processor=CLIP))
    data["image_processor"][field] = value
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(data, Model)


def test_the_lengths_of_chunks() -> None:
    chunks = Chunking(first=1, each=3)
    assert [chunks.lengths(frames) for frames in (1, 4, 6)] == [(1,), (1, 3), (1, 3, 2)]
    assert chunks.lengths(6, 5) == (1, 3, 3) and chunks.lengths(6, 9) == (1, 3, 2)
    assert chunks.lengths(5, 4) == (1, 3, 1) and Chunking(first=3, each=3).lengths(2, 6) == (3,)
    assert [chunks.within(frames) for frames in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 3]
