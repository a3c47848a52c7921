"""The command ``wanbuild calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wanbuild.building import DEBUG, Building
from wancli.command import Input, Number, Written, takes_artifact
from wanrun.errors import UsageError, shortened
from wanrun.terminal.lines import report


def _parse_counts(text: str) -> list[int]:
    """Parses whole numbers separated by commas; raises UsageError for others."""
    if not all(part.strip().isdecimal() and len(part) < 7 for part in text.split(",")):
        raise UsageError("not a list of whole numbers", expected="such as 30,20,12", found=shortened(text))
    return [int(part) for part in text.split(",")]


@click.command("calibrate", cls=Building)
@takes_artifact()
@click.option(
    "--prompts",
    type=Input(),
    help="A file as of wanrun --prompts; every third prompt only judges.  [default: 21 of many kinds]",
)
@click.option(
    "--evaluations",
    type=Written("N,N,...", _parse_counts),
    help="Calls of the transformers, for guidance too.  [default: 1/2, 1/3, 1/5 and 2/15 of the published]",
)
@click.option(
    "--reference-steps",
    type=click.IntRange(min=10, max=1000),
    help="Steps of the runs that count as converged.  [default: 100]",
)
@click.option("--profile", metavar="NAME", help="A built profile.  [default: the first one]")
@click.option("--minutes", type=Number(min=0), help="After which no number of steps is begun.")
@click.option(
    "--from",
    "source",
    type=Input(),
    help="Another artifact, whose schedules are taken as they are; nothing is measured.",
)
@DEBUG
def calibrate_command(artifact: Path, source: Path | None, **options: Any) -> None:
    """Chooses few steps by converged runs, as schedules of wanrun."""
    from wanbuild.calibrate.calibrate import CalibrateRequest, calibrate
    from wanbuild.calibrate.taken import take

    given = {name: value for name, value in options.items() if value is not None}
    if source is not None:
        if given:
            raise UsageError("--from measures nothing", remedy="leave the other options out")
        taken = take(artifact.resolve(), source).schedules
        report(f"{artifact} has the schedules {', '.join(taken)}; those of {source} are not calibrated on it")
        return

    calibrate(CalibrateRequest(artifact, **given), report)
    report(f"calibrated {artifact}")
