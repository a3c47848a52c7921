"""Settings of schedulers and image processors, as diffusers and transformers save and understand them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
from transformers import CLIPImageProcessor

from helpers.image_processors import PROCESSOR_FORMS, write_processor
from wanbuild.published.settings import SCHEDULER_CONFIGS
from wanbuild.source.images import ImageProcessorConfig, open_image_processor
from wanbuild.source.scheduler import SchedulerDefaults, read_scheduler


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
def test_schedulers_as_diffusers_saves_them(tmp_path: Path, solver: str) -> None:
    config = SCHEDULER_CONFIGS[solver]
    cls = getattr(diffusers, config["_class_name"])
    cls.from_config(dict(config)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert {k: v for k, v in saved.items() if k != "_diffusers_version"} == dict(config)
    assert read_scheduler(saved) == SchedulerDefaults(solver, 3.0)  # type: ignore[arg-type]
    field = "shift" if solver == "euler" else "flow_shift"
    assert read_scheduler({**saved, field: 7.5}).flow_shift == 7.5
    assert read_scheduler({**saved, field: 12}, default_shift=5.0).flow_shift == 12.0


def test_a_processor_as_transformers_saves_it(tmp_path: Path) -> None:
    settings = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.5}
    CLIPImageProcessor(size={"shortest_edge": 50}, crop_size=42, **settings).save_pretrained(tmp_path)
    expected = ImageProcessorConfig(50, 42, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 0.5)
    assert open_image_processor(tmp_path) == expected


@pytest.mark.parametrize("content", PROCESSOR_FORMS)
def test_older_and_newer_forms_of_a_processor(tmp_path: Path, content: Mapping[str, Any]) -> None:
    """What is left out has the class's default, which the reference itself states."""
    found = open_image_processor(write_processor(tmp_path, content))
    reference = CLIPImageProcessor(size=content["size"], crop_size=content["crop_size"])
    assert found.size == reference.size["shortest_edge"] == 50
    assert found.crop_size == reference.crop_size["height"] == 42
    assert list(found.image_mean) == list(reference.image_mean)
    assert list(found.image_std) == list(reference.image_std)
    assert found.rescale_factor == reference.rescale_factor
    assert reference.resample == 3
