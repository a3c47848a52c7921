"""Every option of a request is one row, from which each way of asking derives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.damage import flag
from helpers.keywords import FILE, keywords
from helpers.manifests import built_with
from helpers.options import ONE, TWO
from helpers.rules import REPOSITORY
from wancli.run import wanrun
from wanrun.denoising.solvers import SOLVERS
from wanrun.media.inputs import MEDIA_KINDS
from wanrun.request.offered import offered
from wanrun.request.schema import rows, schema


def test_the_command_line_has_every_row() -> None:
    options = {param.name: param for param in wanrun.params}
    for row in rows():
        assert options[row.name].opts == [row.flag, *(["-p"] if row.name == "prompt" else [])]
        assert row.flag == flag(row.key)
        if row.name != "prompt":
            assert row.help.rstrip(".") in str(getattr(options[row.name], "help", ""))


def test_every_option_is_read() -> None:
    """By a line of the runtime, besides its row; images and videos by the manifest's names."""
    lists = {"request.py", "keywords.py", "elsewhere.py"}
    files = (file for file in (REPOSITORY / "runtime").rglob("*.py") if file.name not in lists)
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    others = {row.name for row in rows()} - MEDIA_KINDS.keys()
    assert {name for name in others if not re.search(rf'"{name}"|\.{name}\b', source)} == set()


def test_the_json_schema() -> None:
    found = schema()
    assert found["required"] == ["prompt"] and found["additionalProperties"] is False
    assert set(found["properties"]) == {row.key for row in rows()}
    assert found["properties"]["steps"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10_000,
        "description": "Denoising steps.",
    }
    assert found["properties"]["solver"]["enum"] == sorted(SOLVERS)
    assert found["properties"]["seed"] | {"description": ""} == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**64 - 1,
        "default": 0,
        "description": "",
    }
    assert "null" not in str(found)


def test_a_model_has_what_its_manifest_tells() -> None:
    one, two = ({row.name for row in rows() if offered(row, manifest)} for manifest in (ONE, TWO))
    assert two - one == {"guidance_scale_2", "boundary", "steps_high", "steps_low"}
    assert one & {"window_frames", "clips", "decoder", "mode", "image"} == {"window_frames"}


def test_a_profile_is_built_for_some_options() -> None:
    built = {row.name: row.built for row in rows() if row.built is not None}
    for options, among in (
        ({"guiders": ("cfg-zero",)}, {"guider", "zero_steps"}),
        ({"nag": True}, {"nag_scale", "nag_tau", "nag_alpha"}),
        ({"lora_rank": 4}, {"lora"}),
    ):
        assert {name for name, test in built.items() if test(built_with(**options))} == among


PROGRAM = """
import numpy as np
import wanhub
import wanrun

with wanrun.load("a", memory="low", verify="sha256", prompts=["a fox"]) as pipeline:
    pipeline.generate("a fox", num_steps=3, size=(96, 64), seed="random", solver="euler", image="a.png")
    pipeline.generate("a fox", num_stepz=3)
    pipeline.generate("a fox", num_steps="3")
    pipeline.resolve("a fox", guidance_scale="high")
wanrun.resolve("a", "a fox", solver="heun")
wanrun.load("a", memori="low")
wanrun.load("a", memory=3)
wanrun.load("a", verify="md5")
wanrun.load("a", size="96x64")
wanrun.load("a", size=[96, 64])
wanrun.resolve("a", "a fox", size=[96, 64], media=wanrun.Media(image=np.zeros((4, 4, 3), np.uint8)))
wanhub.check_signed("a", "key.pem")
wanhub.fetch("a", wanrun.needed("a"))
wanrun.open_artifact("a")
wanrun.resolve("a", "a fox", num_inference_steps=4, frame_num=81, sampler_name="euler")
wanrun.errors.UsageError
"""


def test_the_keywords_of_python_are_what_the_rows_say() -> None:
    """After a change of an option: PYTHONPATH=tests python tests/helpers/keywords.py"""
    assert FILE.read_text(encoding="utf-8") == keywords()


@pytest.mark.slow
def test_mypy_refuses_what_is_no_option(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # With the options of `make lint`, which leaves what it has found to the next call.
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    lines = sorted({int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line})
    assert lines == [8, 9, 10, 11, 12, 13, 14], done.stdout + done.stderr
