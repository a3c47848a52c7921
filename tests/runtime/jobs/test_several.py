"""The start of a run of several processes: who cannot start tells the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.run_options import run_options
from wanrun.errors import ArtifactError, ClusterError, UsageError
from wanrun.jobs import several
from wanrun.jobs.several import TELL_SECONDS, worklist_of_several
from wanrun.timing.timings import Timings


def enter(tmp_path: Path, **run: Any) -> None:
    with worklist_of_several(tmp_path / "none", run_options(prompt="a fox", **run), {}, Timings()):
        raise AssertionError("there is no artifact")


@pytest.mark.parametrize("there", [True, False])
def test_a_plan_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Its own error is the one that is raised, whether or not the others come."""
    told = list[BaseException]()

    @contextlib.contextmanager
    def group(run: Any, seconds: float) -> Iterator[None]:
        assert seconds == TELL_SECONDS
        if not there:
            raise ClusterError("not all 2 processes have started")
        try:
            yield
        except BaseException as error:
            told.append(error)
            raise

    monkeypatch.setattr(several, "_group", group)
    with pytest.raises(ArtifactError, match="is not an artifact") as caught:
        enter(tmp_path, coordinator="127.0.0.1:1", num_processes=2, process_id=1)
    assert told == ([caught.value] if there else [])


def test_a_wrong_description_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_processes and process_id must be given too"):
        enter(tmp_path, coordinator="127.0.0.1:1")
