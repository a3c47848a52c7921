"""Files of timings: what they hold is in ``timing/test_timings.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.jobs.timing_files import write_timings
from wanrun.timing.timings import Timings


@pytest.mark.parametrize("option", ["--timing-json", "--timing-trace"])
def test_a_file_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing" / "t.json"
    files = (missing, None) if option == "--timing-json" else (None, missing)
    with pytest.raises(UsageError, match=rf"cannot be written; found No such file.*{option}"):
        write_timings(Timings(), *files)
