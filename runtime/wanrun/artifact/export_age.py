"""The time for which JAX promises to read an exported program, and the messages about an old one.

JAX promises that versions up to six months newer than the one that exported a program read it, and versions
up to three weeks older. It counts from the day that version was built, which an installed JAX does not tell;
the day of the export is known, and it is never earlier. From 0.11.1 on JAX refuses older programs.
"""

from __future__ import annotations

import calendar
import datetime
import shlex
from pathlib import Path

from wanrun.artifact.programs import ProgramSet
from wanrun.errors import ArtifactError

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


def refresh_command(artifact: Path) -> str:
    """Returns the command that exports and compiles an artifact's programs again."""
    return f"wanbuild refresh --artifact {shlex.quote(str(artifact))}"


def age_warning(artifact: Path, programs: ProgramSet) -> str | None:
    """Returns a line if the oldest programs of a set were exported five months ago or earlier, else None."""
    oldest = min(programs.exported.values(), default=None)
    if oldest is None or today() < readable_until(oldest, WARNED_MONTHS):
        return None
    return (
        f"programs of this artifact were exported on {oldest} by jax {programs.jax}; "
        f"JAX promises that newer versions read them until {readable_until(oldest)}; "
        f"run {refresh_command(artifact)}"
    )


def unreadable(artifact: Path, programs: ProgramSet, name: str, reader: str, reason: object) -> ArtifactError:
    """Returns the error for a program that this JAX cannot read.

    Args:
        artifact: the artifact's folder.
        programs: the program's set.
        name: the program's name.
        reader: the version of JAX that tried to read it.
        reason: JAX's message.
    """
    oldest = min(programs.exported.values(), default=None)
    return ArtifactError(
        f"program {name} of {artifact}, which jax {programs.jax} exported on {oldest}, cannot be read",
        expected=f"one that jax {reader} reads",
        found=reason,
        remedy=f"run {refresh_command(artifact)}",
    )
