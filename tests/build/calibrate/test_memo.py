"""What an interrupted calibration keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wanbuild.calibrate.memo import Memo


def never() -> float:
    raise AssertionError("it was measured before")


def test_what_was_measured_is_kept_until_it_is_forgotten() -> None:
    memo = Memo({"content": "a"})
    assert memo.figure({"run": 1}, lambda: 38.5) == 38.5 == memo.figure({"run": 1}, never)
    assert np.array_equal(memo.array("frames", lambda: np.arange(3)), np.arange(3))
    again = Memo({"content": "a"})
    assert again.figure({"run": 1}, never) == 38.5
    assert np.array_equal(again.array("frames", lambda: np.zeros(0)), np.arange(3))
    assert Memo({"content": "b"}).figure({"run": 1}, lambda: 2.0) == 2.0
    again.forget()
    assert Memo({"content": "a"}).figure({"run": 1}, lambda: 1.0) == 1.0


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data + b"\xff\n[]\n{}\n"])
def test_a_damaged_file_costs_its_last_figures(damage: Callable[[bytes], bytes]) -> None:
    memo = Memo({})
    for number in range(2):
        memo.figure({"run": number}, lambda number=number: float(number))  # type: ignore[misc]
    (file,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("figures.jsonl")
    file.write_bytes(damage(file.read_bytes()))
    assert Memo({}).figure({"run": 0}, never) == 0.0
    memo.array("frames", lambda: np.arange(3))
    (frames,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("frames.npy")
    frames.write_bytes(frames.read_bytes()[:-4])
    assert np.array_equal(Memo({}).array("frames", lambda: np.arange(5)), np.arange(5))


def test_without_a_cache_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert Memo({}).figure({}, lambda: 3.0) == 3.0
    assert np.array_equal(Memo({}).array("frames", lambda: np.arange(3)), np.arange(3))
    Memo({}).forget()
