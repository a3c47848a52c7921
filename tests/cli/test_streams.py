"""Standard output: lines of this program and none of C++, or a video and no lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wancli.streams import stdout_for_video
from wanrun.errors import UsageError

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


VIDEO = """
import os, subprocess
from wancli.streams import stdout_for_video
print("before")
video = stdout_for_video()
print("after", flush=True)
subprocess.run(["echo", "other"])
os.write(video, bytes(3))
"""


def test_a_video_alone() -> None:
    done = subprocess.run([sys.executable, "-c", VIDEO], capture_output=True, check=True)
    assert (done.stdout, done.stderr.split()) == (b"before\n" + bytes(3), [b"after", b"other"])


def test_a_terminal_takes_no_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(UsageError, match="--output"):
        stdout_for_video()
