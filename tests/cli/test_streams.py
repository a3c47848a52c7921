"""Standard output in a run of several processes: lines of this program, and none of C++."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os
from wancli.streams import keep_stdout
print("before")
keep_stdout(quiet={quiet})
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks\\n")
print("after \N{SNOWMAN}")
"""


@pytest.mark.parametrize(("quiet", "lines"), [(False, ["before", "after \N{SNOWMAN}"]), (True, ["before"])])
def test_lines_of_others(quiet: bool, lines: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", CODE.format(quiet=quiet)],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.splitlines() == lines
