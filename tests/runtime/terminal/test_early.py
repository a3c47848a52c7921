"""The first moments of a command: closed standard streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys
from pathlib import Path

from wanrun.terminal.early import start

start()
from wanrun.terminal.status import Status  # which asks whether stderr is a terminal

with Status(lambda: ()):
    pass
print("out")
print("err", file=sys.stderr)
with Path(sys.argv[1]).open("w") as file:
    file.write(f"{file.fileno()}")
"""


@pytest.mark.parametrize(("options", "words"), [([], ""), (["-W", "default"], "overflow encountered")])
def test_warnings_of_libraries_are_not_for_users(options: list[str], words: str) -> None:
    code = "from wanrun.terminal.early import start; start(); import numpy, warnings; numpy.float32(3e38) * 9"
    code += "; warnings.warn('Corrupt EXIF data')"  # as Pillow does
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and words in done.stderr and (words or not done.stderr)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_does_not_end_a_run(closed: str, tmp_path: Path) -> None:
    """And no file gets the number of a standard stream, to which libraries write."""
    script, result = tmp_path / "script.py", tmp_path / "result"
    script.write_text(CODE)
    shell = f'exec "{sys.executable}" "{script}" "{result}" {closed}'
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(result.read_text()) > 2
    assert done.stdout == ("" if "1>" in closed else "out\n")
    assert done.stderr == ("" if "2>" in closed else "err\n")
