"""The time for which JAX promises to read an exported program, and the message about an old one.

JAX promises that versions up to six months newer than the one that exported a program read it, and versions
up to three weeks older. It counts from the day that version was built, which an installed JAX does not tell;
the day of the export is known, and it is never earlier. From 0.11.1 on JAX refuses older programs.
"""

from __future__ import annotations

import calendar
import datetime

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import ProgramSet
from wanrun.executables.store import refresh_command

READABLE_MONTHS = 6
WARNED_MONTHS = 5
"""The warning starts a month before the promise ends."""


def today() -> datetime.date:
    """Returns today's date in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


def readable_until(exported: datetime.date, months: int = READABLE_MONTHS) -> datetime.date:
    """Returns the same day ``months`` months later, or the last day of that month."""
    year, month = divmod(exported.year * 12 + exported.month - 1 + months, 12)
    return datetime.date(year, month + 1, min(exported.day, calendar.monthrange(year, month + 1)[1]))


def age_warning(artifact: Artifact, programs: ProgramSet) -> str | None:
    """Returns a line if the oldest programs of a set were exported five months ago or earlier, else None."""
    oldest = min(programs.exported.values(), default=None)
    if oldest is None or today() < readable_until(oldest, WARNED_MONTHS):
        return None
    return (
        f"programs of this artifact were exported on {oldest} by jax {programs.jax}; "
        f"JAX promises that newer versions read them until {readable_until(oldest)}; "
        f"run {refresh_command(artifact)}"
    )
