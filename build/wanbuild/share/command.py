"""The commands that put artifacts where many machines fetch them from: ``wanbuild oci``."""

from __future__ import annotations

from pathlib import Path

import click

from wanbuild.building import DEBUG
from wanrun.command import takes_artifact
from wanrun.terminal.lines import report


@click.command("oci")
@takes_artifact()
@click.option(
    "-o",
    "--output",
    "output",
    type=click.Path(path_type=Path),
    required=True,
    help="The layout's folder: a new one, or a layout, whose other images stay.",
)
@click.option("--tag", default="latest", show_default=True, help="The image's name in the layout.")
@click.option("--target", "targets", multiple=True, help="Repeatable; a built target.  [default: all]")
@click.option("--licence", metavar="SPDX", help="Of the weights, such as Apache-2.0.")
@DEBUG
def oci_command(
    artifact: Path, output: Path, tag: str, targets: tuple[str, ...], licence: str | None
) -> None:
    """Writes an artifact as an OCI image layout, for registries and clusters."""
    from wanbuild.share.oci import OciRequest, write_layout

    digest = write_layout(OciRequest(artifact, output, tag, targets, licence), report)
    report(f"wrote {output}:{tag}, {digest}")
