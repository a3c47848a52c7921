"""What ``import wanrun`` gives: names that are resolved on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wanhub
import wanrun
from wanrun.generation import load, pipeline
from wanrun.generation.result import Result
from wanrun.media.inputs import Media


def test_each_name_is_what_its_module_defines() -> None:
    assert (wanrun.Pipeline, wanrun.load) == (pipeline.Pipeline, load.load)
    assert (wanrun.Media, wanrun.Result) == (Media, Result)
    for module in (wanrun, wanhub):
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"'wanrun' .*'generate'"):
        wanrun.generate  # noqa: B018


def test_the_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, wanrun; print(*{'jax', 'numpy', 'PIL', 'msgspec', 'click'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
