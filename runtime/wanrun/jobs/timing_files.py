"""Writes the timings of a run to the files that its options name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wanrun.errors import unwritable
from wanrun.files import replace_file
from wanrun.timing.timings import Timings


def write_timings(timings: Timings, json_file: Path | None, trace_file: Path | None) -> None:
    """Writes timings, atomically.

    Args:
        timings: the timings.
        json_file: gets ``Timings.as_json``, indented; None for no such file.
        trace_file: gets ``Timings.as_trace``, which ui.perfetto.dev opens; None for no such file.

    Raises:
        UsageError: if a file cannot be written.
    """
    if json_file is not None:
        _write(json_file, timings.as_json(), 2, "--timing-json")
    if trace_file is not None:
        _write(trace_file, timings.as_trace(), None, "--timing-trace")


def _write(path: Path, content: Any, indent: int | None, option: str) -> None:
    try:
        replace_file(path, (json.dumps(content, indent=indent) + "\n").encode())
    except OSError as error:
        raise unwritable(f"the timing file {path}", error, f"choose another {option}") from error
