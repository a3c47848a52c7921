"""The file of a report, which is written whole at the end of the work that it is about."""

from __future__ import annotations

import datetime
from pathlib import Path

from wanreport.page import html
from wanreport.report import Report
from wanrun import replace_file
from wanrun.errors import unwritable


def write_report(path: Path, report: Report) -> None:
    """Writes a report's page; who reads the file sees the old page or the new one.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        replace_file(path, html(report).encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise unwritable(f"the report {path}", error, "choose another --report") from error


def now() -> str:
    """Returns the time, for ``Report.made``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
