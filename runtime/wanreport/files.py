"""Writes the file of a report, whole, at the end of the work that it is about."""

from __future__ import annotations

import datetime
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from wanreport.page import html
from wanreport.report import Fact, Facts, Report, Section
from wanrun import replace_file
from wanrun.errors import unwritable


def write_report(path: Path, report: Report) -> None:
    """Writes a report's page atomically; it ends with the command of this process.

    Raises UsageError if it cannot be written.
    """
    repeat = Section("Repeat", (Facts((Fact("Command", command(), code=True),)),))
    try:
        page = html(replace(report, sections=(*report.sections, repeat)))
        replace_file(path, page.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise unwritable(f"the report {path}", error, "choose another --report") from error


def command() -> str:
    """Returns the command of this process, for a shell."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def now() -> str:
    """Returns the time, for ``Report.made``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
