"""The table of guiders."""

from __future__ import annotations

from typing import get_args

from wanrun.artifact.guiders import BUILT, GUIDERS, OWN_OPTIONS, SKIPPED_LAYERS, GuiderName, inputs_of
from wanrun.denoising.steps import TABLES


def test_every_guider_has_its_row_and_its_input_a_table() -> None:
    assert tuple(GUIDERS) == get_args(GuiderName)
    assert "cfg" not in BUILT and len(BUILT) == len(GUIDERS) - 1
    inputs = [name for one in GUIDERS.values() for name in one.inputs]
    assert TABLES.keys() > {*inputs} and len(set(inputs)) == len(inputs) and len(OWN_OPTIONS) == 5
    assert inputs_of(BUILT, 7) == {**dict.fromkeys(inputs, ()), SKIPPED_LAYERS: (7,)}
