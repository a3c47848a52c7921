"""The file of a report: checked before the work that it is about, and written whole at its end."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from wanreport.page import html
from wanreport.report import Report
from wanrun.errors import UsageError, unwritable


def check_file(path: Path, outside: Path | None = None, others: Sequence[Path | None] = ()) -> None:
    """Checks that a report can be written.

    Args:
        path: its file, which may be there.
        outside: a folder in which it may not lie, such as the artifact that it is about.
        others: further files of the same command.

    Raises:
        UsageError: if it cannot be written, or must not.
    """
    real, remedy = os.path.realpath(path), "name another file (.html)"
    writable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    if (path.exists() and not path.is_file()) or not writable:
        raise UsageError(
            f"--report {path} cannot be written", expected="a file in a writable folder", remedy=remedy
        )
    if outside is not None and Path(real).is_relative_to(os.path.realpath(outside)):
        raise UsageError(f"--report {path} lies inside {outside}", remedy=remedy)
    if real in [os.path.realpath(other) for other in others if other is not None]:
        raise UsageError(f"--report {path} is also another file of this command", remedy=remedy)


def write_report(path: Path, report: Report) -> None:
    """Writes a report's page; who reads the file sees the old page or the new one.

    Raises:
        UsageError: if it cannot be written.
    """
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text(html(report), encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(f"the report {path}", error, "choose another --report") from error


def now() -> str:
    """Returns the time, for ``Report.made``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
