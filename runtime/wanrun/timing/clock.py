"""The clock of all timings: seconds since the process started."""

from __future__ import annotations

__all__ = ["now"]

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()


def process_start_seconds_ago() -> float:
    """Returns the seconds since the kernel started this process, to 10 ms; since import if that is unknown.

    Source: proc_pid_stat(5), field 22: the start time after boot in clock ticks.
    """
    since_import = time.monotonic() - _IMPORTED
    try:
        # The second field is the command in parentheses, which may contain spaces and parentheses.
        fields = (
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, since_import)
    except (OSError, AttributeError, IndexError, ValueError):
        return since_import


_ORIGIN = time.monotonic() - process_start_seconds_ago()


def now() -> float:
    """Returns the seconds since the process started."""
    return time.monotonic() - _ORIGIN
