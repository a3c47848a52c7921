"""The process's own clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanrun.timing import clock
from wanrun.timing.clock import process_start_seconds_ago


def test_the_clock_starts_with_the_process_and_not_with_the_import() -> None:
    started = time.monotonic()
    code = "import time; time.sleep(0.3); from wanrun.timing.clock import now; print(now())"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    outside = time.monotonic() - started
    # The kernel's record has ticks of 10 ms.
    assert 0.3 - 0.02 < float(printed) < outside + 0.02


def test_without_the_kernels_record_the_clock_starts_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **kwargs: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    since_import = time.monotonic() - clock._IMPORTED
    assert process_start_seconds_ago() == pytest.approx(since_import, abs=0.05)


def test_command_names_do_not_confuse_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = Path("/proc/self/stat").read_text(), process_start_seconds_ago()
    odd = plain[: plain.index("(")] + "(a) R 1 (b c)" + plain[plain.rindex(")") + 1 :]
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: odd)
    assert process_start_seconds_ago() == pytest.approx(expected, abs=0.05)
