"""The command ``wanbuild calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wanbuild.building import DEBUG, Building
from wanbuild.calibrate.request import CalibrateRequest
from wancli.command import Input, takes_artifact
from wancli.options import given, made_options
from wanrun.errors import UsageError
from wanrun.rows import rows_of
from wanrun.terminal.lines import report


@click.command("calibrate", cls=Building, options=lambda: made_options(rows_of(CalibrateRequest)))
@takes_artifact()
@click.option(
    "--from",
    "source",
    type=Input(),
    help="Another artifact, whose schedules are taken as they are; nothing is measured.",
)
@DEBUG
def calibrate_command(artifact: Path, source: Path | None, **options: Any) -> None:
    """Chooses few steps by converged runs, as schedules of wanrun."""
    from wanbuild.calibrate.calibrate import calibrate
    from wanbuild.calibrate.taken import take

    if source is not None:
        if given(options):
            raise UsageError("--from measures nothing", remedy="leave the other options out")
        taken = take(artifact.resolve(), source).schedules
        report(f"{artifact} has the schedules {', '.join(taken)}; those of {source} are not calibrated on it")
        return

    calibrate(CalibrateRequest(artifact, **given(options)), report)
    report(f"calibrated {artifact}")
