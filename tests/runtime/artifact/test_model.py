"""The model's record: defaults and the options that a model has, and an image encoder's images."""

from __future__ import annotations

import msgspec
import pytest

from helpers.manifests import plain_model
from helpers.media_files import task_of
from helpers.media_tasks import CLIP, VARIANTS
from wanrun.artifact.model import Model


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
    with pytest.raises(ValueError, match=r"^image is encoded, and there is no image processor"):
        plain_model(task=task_of("wan2.1-i2v"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_record_is_read_as_it_was_written(variant: str) -> None:
    model = plain_model(variant=variant, task=task_of(variant), image_processor=CLIP)
    data = msgspec.json.encode(model)
    assert msgspec.json.decode(data, type=Model) == model
    assert msgspec.json.encode(msgspec.json.decode(data, type=Model)) == data


@pytest.mark.parametrize(
    ("field", "value"), [("vae_spatial", 0), ("leading_latents", -1), ("text_width", "32"), ("task", None)]
)
def test_a_value_out_of_range_is_refused(field: str, value: object) -> None:
    data = {**msgspec.to_builtins(plain_model()), field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(data, Model)
