"""What a run is told where its command line gives nothing else."""

from __future__ import annotations

from typing import Any

from wancli.jobs.run_options import RunOptions
from wanrun.rows import record_of


def run_options(**changes: Any) -> RunOptions:
    """The command line's defaults, with these changes: options of a run, and those of loading."""
    output = changes.pop("output", "out.mp4")
    return record_of(RunOptions, {"output": output and str(output), **changes})
