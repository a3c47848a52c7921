"""Settings of schedulers and image processors, as diffusers and transformers save and understand them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import pytest
from transformers import CLIPImageProcessor

from helpers.image_processors import PROCESSOR_FORMS, write_processor
from wanbuild.published.schedulers import SCHEDULER_CONFIGS
from wanbuild.source.image_processor import ImageProcessorConfig, open_image_processor
from wanbuild.source.scheduler import (
    DPMSolverConfig,
    FlowMapEulerConfig,
    FlowMatchEulerConfig,
    SchedulerDefaults,
    UniPCConfig,
    read_scheduler,
)
from wanbuild.variants.table import variants
from wanrun.denoising.solvers import solver_table


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("solver", sorted(SCHEDULER_CONFIGS.keys() - {"self-forcing"}))
def test_schedulers_as_diffusers_saves_them(tmp_path: Path, solver: str) -> None:
    config = SCHEDULER_CONFIGS[solver]
    cls = getattr(diffusers, config["_class_name"])
    cls.from_config(dict(config)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert {k: v for k, v in saved.items() if k != "_diffusers_version"} == dict(config)
    if (row := variants().get(solver)) is not None:  # Helios', but for what no file says
        assert row.pyramid is not None
        plain = msgspec.structs.replace(row.pyramid, doubled=False)
        assert read_scheduler(saved) == SchedulerDefaults(row.solver, row.flow_shift, pyramid=plain)
        return
    assert read_scheduler(saved) == SchedulerDefaults(solver, 5.0 if solver == "flow-map" else 3.0)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize(
    "config_class", [UniPCConfig, DPMSolverConfig, FlowMatchEulerConfig, FlowMapEulerConfig]
)
def test_fields_that_are_left_out_are_the_classes_defaults(config_class: Any) -> None:
    (name,) = config_class.CLASS_NAMES
    scheduler = getattr(diffusers, name)
    reference = inspect.signature(scheduler.__init__).parameters
    fixed = {field: reference[field].default for field in config_class.FIXED}
    assert fixed == {**config_class.FIXED}
    solver, flow = config_class.SOLVER, {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    euler = solver in ("euler", "flow-map")
    least = {"_class_name": name, **({} if euler else flow)}
    found = read_scheduler(least)
    assert found == SchedulerDefaults(solver, 1.0, assumed=True)
    null = {"shift" if euler else "flow_shift": None}  # with it, diffusers makes no step
    assert read_scheduler({**least, **null}) == found
    judge = scheduler.from_config(least)
    judge.set_timesteps(7)
    table = solver_table(solver, 7, found.flow_shift)
    assert table.timesteps.tolist() == judge.timesteps.float().tolist()
    assert table.sigmas.tolist() == judge.sigmas.float().tolist()


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
