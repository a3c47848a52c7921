"""This machine as a chip: its CPU is measured once, and planned for as any chip."""

from __future__ import annotations

import os

import pytest

from wanbuild.build_options import PlanRequest
from wanbuild.plan import here
from wanbuild.plan.here import this_machine
from wanbuild.plan.plan import make_plan, parse_chip
from wanbuild.plan.plan_report import table
from wanbuild.plan.subject import read_subject

pytestmark = pytest.mark.slow

RATES = {"bfloat16": 3e11, "float32": 1.5e11, "bytes": 1e10}


def test_a_cpu_is_measured_once_where_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[object]()
    monkeypatch.setattr(here, "_measured", lambda target: measured.append(target) or RATES)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    this_machine("cpu")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    this_machine("cpu")
    chip, count = parse_chip("cpu")
    assert len(measured) == 2 and count is None
    assert (chip.bf16, chip.float32, chip.bandwidth, chip.counts) == (3e11, 1.5e11, 1e10, (1,))
    plan = make_plan(read_subject("wan2.1-t2v-1.3b"), PlanRequest("cpu", {"sizes": (832, 480)}))
    (video,) = [line for line in table(plan) if line.startswith("video")]
    assert " h, " in video


def test_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("_ROWS", 64), ("_FEATURES", 64), ("_VALUES", 2**12), ("_TIMES", 1)):
        monkeypatch.setattr(here, name, few)
    chip = this_machine("cpu")
    assert min(chip.bf16, chip.float32, chip.bandwidth) > 1e6
