"""The table of guiders."""

from __future__ import annotations

from typing import get_args

from wanrun.artifact.guiders import BUILT, GUIDERS, GuiderName, inputs_of
from wanrun.denoising.steps import TABLES


def test_every_guider_has_its_row_and_its_input_a_table() -> None:
    assert tuple(GUIDERS) == get_args(GuiderName)
    assert "cfg" not in BUILT and len(BUILT) == len(GUIDERS) - 1
    assert len(set(inputs_of(BUILT))) == len(BUILT) and TABLES.keys() >= {*inputs_of(BUILT)}
