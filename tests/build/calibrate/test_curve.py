"""The curve: what is drawn of schedules, and that it needs a library."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from helpers.refusals import refuses
from wanbuild.calibrate.curve import AXIS, Point, draw, of_schedules
from wanrun.artifact.schedules import Schedule


def schedule(steps: int, **measured: float) -> Schedule:
    timesteps = tuple(float(one) for one in np.linspace(1000, 100, steps))
    return Schedule(solver="unipc", timesteps=timesteps, guidance_scale=5.0, measured=measured)


def test_the_lines_of_an_artifact() -> None:
    ends = {"psnr_low": 29.0, "psnr_high": 31.0}
    eight = schedule(8, psnr=40.0, plain_psnr=35.0)
    made = {"8": eight, "4": schedule(4, psnr=30.0, plain_psnr=25.0, **ends), "mine": schedule(6)}
    chosen, plain = of_schedules(made).values()
    assert chosen == [Point(8, 30.0, 29.0, 31.0), Point(16, 40.0)]
    assert plain == [Point(8, 25.0), Point(16, 35.0)]
    assert of_schedules({"mine": schedule(6)}) == {}


@pytest.mark.slow
def test_a_panel_for_each_title(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"one": [Point(8, 30.0, 29.0, 31.0), Point(16, 40.0, 39.0, 41.0)], "two": [Point(8, 25.0)]}
    picture, wider = draw({"a": lines}, AXIS), draw({"a": lines, "b": lines}, AXIS)
    assert picture == draw({"a": lines}, AXIS)
    found, other = (Image.open(io.BytesIO(one)) for one in (picture, wider))
    assert other.size == (2 * found.size[0], found.size[1])
    assert len(np.unique(np.asarray(found.convert("RGB")).reshape(-1, 3), axis=0)) > 100
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refuses("not_installed", remedy="pip install matplotlib"):
        draw({"a": lines}, AXIS)
