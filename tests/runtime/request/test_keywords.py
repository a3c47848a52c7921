"""Type checkers know every option of ``generate``, and refuse what is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.keywords import FILE, keywords

PROGRAM = """
import numpy as np
import wanhub
import wanrun

with wanrun.load("a", memory="low") as pipeline:
    pipeline.generate("a fox", num_steps=3, size=(96, 64), seed="random", solver="euler", image="a.png")
    pipeline.generate("a fox", num_stepz=3)
    pipeline.generate("a fox", num_steps="3")
    pipeline.resolve("a fox", guidance_scale="high")
wanrun.resolve("a", "a fox", solver="heun")
wanrun.load("a", memori="low")
wanrun.load("a", memory=3)
wanrun.load("a", size="96x64")
wanrun.load("a", size=[96, 64])
wanrun.resolve("a", "a fox", size=[96, 64], media=wanrun.Media(image=np.zeros((4, 4, 3), np.uint8)))
wanhub.check_signed("a", "key.pem")
wanhub.fetch("a", wanrun.needed("a"))
wanrun.open_artifact("a")
wanrun.resolve("a", "a fox", num_inference_steps=4, frame_num=81, sampler_name="euler")
wanrun.errors.UsageError
"""


def test_the_file_is_what_the_rows_say() -> None:
    """After a change of an option: PYTHONPATH=tests python tests/helpers/keywords.py"""
    assert FILE.read_text(encoding="utf-8") == keywords()


@pytest.mark.slow
def test_mypy_refuses_what_is_no_option(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # With the options of `make lint`, which leaves what it has found to the next call.
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    lines = sorted({int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line})
    assert lines == [8, 9, 10, 11, 12, 13], done.stdout + done.stderr
