"""The file of timings: what it holds is in ``timing/test_timings.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.jobs.timing_files import write_timings
from wanrun.timing.timings import Timings


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    write_timings(Timings(), None)
    with pytest.raises(UsageError, match=r"cannot be written; found No such file.*--timing-json"):
        write_timings(Timings(), tmp_path / "missing" / "t.json")
