"""The command ``wanbuild calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wanbuild.build_command import BuildCommand, error_options
from wanbuild.calibrate.calibrate_options import CalibrateRequest
from wancli.click_options import given, made_options
from wancli.command import takes_artifact
from wanrun.errors import UsageError
from wanrun.rows import rows_of
from wanrun.terminal.lines import report, warn


@click.command("calibrate", cls=BuildCommand, options=lambda: made_options(rows_of(CalibrateRequest)))
@takes_artifact()
@error_options
def calibrate_command(artifact: Path, **options: Any) -> None:
    """Fits schedules of few steps to converged runs, for wanrun --schedule."""
    from wanbuild.calibrate.calibrate import calibrate

    request = CalibrateRequest(artifact, **given(options))
    if request.source is not None and request.evaluations is not None:
        raise UsageError(
            "no_effect",
            "--evaluations has no effect with --from, whose schedules say them",
            remedy="leave one out",
        )
    calibrate(request, report, warn)
    report(f"calibrated {artifact}")
