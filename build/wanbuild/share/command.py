"""The commands that put artifacts where many machines fetch them from, and show who made them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from wanbuild.building import DEBUG, Building
from wancli.command import Checked, Input, Output, fetch_all, takes_artifact, takes_overwrite
from wanhub.signature import KEY_PASSWORD, SIGNATURE, signer
from wanrun.claims import ARTIFACT, Place
from wanrun.errors import unwritable
from wanrun.terminal.lines import print_result, report

_BILL = Place(mark=re.compile(rb'\{(?s:(?=.*"bomFormat": "CycloneDX").*"wan:content-digest")'))
_TARGETS = click.option(
    "--target", "targets", multiple=True, help="Repeatable; a built target.  [default: all]"
)
_LICENCE = click.option(
    "--licence", metavar="SPDX", help="Of the weights, such as Apache-2.0.  [default: that of a known source]"
)


@click.command("oci", cls=Checked)
@takes_artifact()
@click.option(
    "-o",
    "--output",
    "output",
    type=Output(),
    required=True,
    help="The layout's folder: a new one, or a layout, whose other images stay.",
)
@click.option("--tag", default="latest", show_default=True, help="The image's name in the layout.")
@_TARGETS
@_LICENCE
@DEBUG
def oci_command(
    artifact: Path, output: Path, tag: str, targets: tuple[str, ...], licence: str | None
) -> None:
    """Writes an artifact as an OCI image layout, for registries and clusters."""
    from wanbuild.share.oci import OciRequest, write_layout

    fetch_all(artifact, targets=targets)
    digest = write_layout(OciRequest(artifact, output, tag, targets, licence), report)
    report(f"wrote {output}:{tag}, {digest}")


@click.command("push", cls=Building)
@click.argument("artifact", type=Input())
@click.argument("repository", metavar="OWNER/NAME")
@_TARGETS
@click.option("--private", is_flag=True, help="Make a new repository private.")
@_LICENCE
@click.option(
    "--example", type=Input(), metavar="VIDEO", help="A video that wanrun made from it, for the model card."
)
@DEBUG
def push_command(
    artifact: Path,
    repository: str,
    targets: tuple[str, ...],
    private: bool,
    licence: str | None,
    example: Path | None,
) -> None:
    """Publishes an artifact on the Hugging Face hub, with a model card."""
    from wanbuild.share.push import PushRequest, push

    fetch_all(artifact, targets=targets)
    address = push(PushRequest(artifact, repository, targets, private, licence, example), report)
    report(f"pushed {address}")


@click.command("pull", cls=Building)
@click.argument("address")
@click.option(
    "-o", "--output", type=Output(ARTIFACT), metavar="DIR", help="A folder.  [default: the user's cache]"
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Repeatable; a built target.  [default: those that fit this machine]",
)
@click.option("--all-targets", "whole", is_flag=True, help="Fetch all of the artifact.")
@DEBUG
def pull_command(address: str, output: Path | None, targets: tuple[str, ...], whole: bool) -> None:
    """Fetches an artifact's newest revision.

    ADDRESS is hf://OWNER/NAME[@REVISION], or the URL of its folder.
    """
    from wanbuild.share.pull import PullRequest, pull

    folder = pull(PullRequest(address, output, targets, whole), report)
    report(f"pulled into {folder}")


@click.command("sign", cls=Checked)
@takes_artifact()
@click.option(
    "--key",
    type=Input(),
    required=True,
    help=f"An elliptic curve key, PEM; if it is encrypted, with its password in {KEY_PASSWORD}.",
)
@DEBUG
def sign_command(artifact: Path, key: Path) -> None:
    """Checks every file of an artifact, and signs its manifest, which has all their digests."""
    from wanrun.artifact.artifact import open_artifact
    from wanrun.intact import check_intact

    sign = signer(key, os.environ.get(KEY_PASSWORD) or None)  # before the artifact, which takes longer
    fetch_all(artifact)
    opened = open_artifact(artifact)
    check_intact(opened, report)
    sign(artifact)
    report(f"wrote {artifact / SIGNATURE}, for manifest {opened.manifest.manifest_digest}")


@click.command("sbom", cls=Checked)
@takes_artifact()
@click.option("-o", "--output", type=Output(_BILL), metavar="FILE", help="[default: standard output]")
@takes_overwrite
@_LICENCE
@DEBUG
def sbom_command(artifact: Path, output: Path | None, licence: str | None) -> None:
    """Writes an artifact's bill of materials: CycloneDX 1.6, JSON."""
    from wanbuild.share.sbom import bill_of_materials
    from wanrun.artifact.artifact import open_artifact
    from wanrun.artifact.named import REQUIREMENTS
    from wanrun.files import replace_file

    fetch_all(artifact, REQUIREMENTS)
    text = bill_of_materials(open_artifact(artifact), licence)
    if output is None:
        print_result(*text.splitlines())
        return
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise unwritable(f"the bill of materials {output}", error, "choose another --output") from error


COMMANDS = (oci_command, pull_command, push_command, sbom_command, sign_command)
