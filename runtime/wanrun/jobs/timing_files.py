"""Writes the timings of a run to the file that its options name."""

from __future__ import annotations

import json
from pathlib import Path

from wanrun.errors import unwritable
from wanrun.files import replace_file
from wanrun.timing.timings import Timings


def write_timings(timings: Timings, path: Path | None) -> None:
    """Writes ``Timings.as_json``, indented and atomically; None means no file.

    Raises:
        UsageError: if the file cannot be written.
    """
    if path is None:
        return
    try:
        replace_file(path, (json.dumps(timings.as_json(), indent=2) + "\n").encode())
    except OSError as error:
        raise unwritable(f"the timing file {path}", error, "choose another --timing-json") from error
