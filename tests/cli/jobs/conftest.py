"""Fixtures of the tests of jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.options import run_options
from wancli.jobs.worklist import Worklist, make_worklist
from wanrun.artifact.artifact import open_artifact
from wanrun.timing.timings import Timings


@pytest.fixture
def worklist_of(artifact: Path, tmp_path: Path) -> Callable[..., Worklist]:
    """Plans a run over the toy artifact, from keywords of ``RunOptions`` and the options of a generation."""

    def make(given: dict[str, Any] | None = None, **run: Any) -> Worklist:
        how = run_options(**{"output": tmp_path / "o.npy", **run})
        return make_worklist(
            lambda: open_artifact(artifact), how, {"num_steps": 2, **(given or {})}, Timings()
        )

    return make
