"""``wanrun.load``: type checkers and ``help`` know its keywords, which are those of the records."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.refusals import refuses
from wanrun.generation.load import LoadKeywords
from wanrun.opened import device as device_module
from wanrun.opened.policy import LoadPolicy
from wanrun.weights import readahead as ahead_module


def test_help_shows_every_keyword_with_its_default() -> None:
    parameters = inspect.signature(wanrun.load).parameters
    assert list(parameters) == ["artifact", *LoadKeywords.__struct_fields__]
    assert parameters["verify"].default == "fast" and parameters["prompts"].default is None
    assert set(LoadPolicy.__struct_fields__) < set(parameters)


@pytest.mark.slow
def test_type_checkers_know_the_keywords(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import wanrun\n"
        'wanrun.load("a", verify="sha256", size=(96, 64), prompts=["a fox"])\n'
        'wanrun.load("a", verify="md5")\n'
        'wanrun.load("a", sizes=(96, 64))\n'
    )
    # With the options of `make lint`, which leaves what it has found to the next call.
    command = [sys.executable, "-m", "mypy", str(script)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in errors] == ["3", "4"], done.stdout + done.stderr
    assert "verify" in errors[0] and "sizes" in errors[1]


@pytest.mark.slow
def test_weights_are_read_while_a_device_starts_slowly(
    toy_artifact: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = list[str](), device_module.open_devices

    def start(*arguments: Any, **options: Any) -> Any:
        read.extend(reads)
        return real(*arguments, **options)

    monkeypatch.setattr(device_module, "open_devices", start)
    with wanrun.load(toy_artifact, prompts=["a fox"], embeddings="none") as quick:
        assert read == [] and reads == ["text_encoder", "transformer"]
        expected = quick.generate("a fox", num_steps=1).latents
    reads.clear()
    monkeypatch.setattr(ahead_module, "SLOW", {"cpu"})
    with wanrun.load(toy_artifact, prompts=["a fox"], embeddings="none") as slow:
        assert read == ["transformer"] and reads == ["transformer", "text_encoder"]
        assert np.array_equal(slow.generate("a fox", num_steps=1).latents, expected)


def test_a_profile_is_chosen_in_one_way(toy_artifact: Path) -> None:
    (name,) = wanrun.load(toy_artifact, lazy=True).manifest.profiles
    with refuses("conflict", what="size"):
        wanrun.load(toy_artifact, profile=name, size=(96, 64))
