"""Checkpoints whose first upload has the classes of its authors."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.former_names import as_first_uploaded, edited
from wanbuild.components import kind_of
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.source.scheduler import read_scheduler
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.errors import SourceError

VARIANTS = ("anyflow-wan2.1", "anyflow-far-wan2.1")


@pytest.mark.parametrize("variant", VARIANTS)
def test_nvlabs_names_mean_diffusers(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", variant, flow_shift=5.0)
    folder = as_first_uploaded(tmp_path / "toy", tmp_path / "first")
    with open_source(tmp_path / "toy") as toy, open_source(folder) as source:
        assert variant_of(source).name == variant
        assert source.pipeline_class == toy.pipeline_class
        assert read_scheduler(source.scheduler_config) == read_scheduler(toy.scheduler_config)
        found, expected = (one.component("transformer") for one in (source, toy))
        assert found.class_name == expected.class_name
        kind = kind_of("transformer", found.class_name)
        assert kind.parse(found.config, "x") == kind.parse(expected.config, "x")
    # A class of NVlabs is both of diffusers', and its config says which.
    edited(folder / "transformer/config.json", init_far_model=variant == VARIANTS[0])
    with open_source(folder) as source, pytest.raises(SourceError):
        transformer = source.component("transformer")
        kind_of("transformer", transformer.class_name).parse(transformer.config, "x")
    edited(folder / "transformer/config.json", init_flowmap_model=False)
    with open_source(folder) as source:
        assert source.component("transformer").config["_class_name"] == "FAR_Wan_Transformer3DModel"
