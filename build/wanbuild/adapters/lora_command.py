"""The command ``wanbuild lora``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wanbuild.adapters.lora_options import AdapterRequest
from wanbuild.build_command import BuildCommand, error_options
from wancli.click_options import given, made_options
from wancli.command import artifact_option, takes_overwrite
from wanrun.errors import UsageError
from wanrun.rows import rows_of
from wanrun.terminal.lines import report, warn


@click.command("lora", cls=BuildCommand, options=lambda: made_options(rows_of(AdapterRequest)))
@click.argument("lora", nargs=-1, metavar="FILE[:SCALE]...")
@artifact_option(required=True)
@takes_overwrite
@error_options
def lora_command(artifact: Path, **options: Any) -> None:
    """Turns LoRA files into an adapter of an artifact, which each video may choose.

    Several files become one adapter, each with its scale.
    """
    from wanbuild.adapters.make import make_adapter, remove_adapters

    request = AdapterRequest(artifact=artifact, **given(options))
    files = (*request.lora, *request.lora_high, *request.lora_low)
    if request.remove:
        others = [name for name in given(options) if options[name] and name != "remove"]
        if others:
            raise UsageError("conflict", "--remove excludes other options", remedy="remove first, then add")
        remove_adapters(artifact, request.remove, report)
        return
    if not files:
        raise UsageError(
            "missing_file",
            "there is no LoRA file",
            remedy="wanbuild lora FILE... --artifact DIR (see wanbuild lora --help)",
        )
    if request.output is not None and request.name is not None:
        raise UsageError("no_effect", "--name has no effect with --output", remedy="leave one out")
    make_adapter(request, report, warn)
