"""The logical axes in a manifest are those of the modules that its programs are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanbuild.components import kind_of
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.models.params import parameter_axes
from wanbuild.toy.checkpoint import write_toy
from wanbuild.variants.table import variants


@pytest.mark.parametrize("variant", variants())
def test_axes_are_the_modules(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", variant)
    manifest = convert(ConvertRequest(tmp_path / "toy", tmp_path / "artifact"))
    for name, component in manifest.components.items():
        kind = kind_of(name, manifest.configs[name].get("_class_name"))
        module = kind.module(kind.parse(manifest.configs[name], name), manifest.dtypes[name])
        recorded = {path: parameter.axes for path, parameter in component.parameters.items()}
        assert recorded == parameter_axes(module)
        named = {axis for axes in recorded.values() for axis in axes} - {None, "layers"}
        assert bool(named) == (name != "vae")  # which is not split: its convolutions are small
