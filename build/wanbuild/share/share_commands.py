"""The commands that publish artifacts, fetch them, and show who made them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from wanbuild.build_command import BuildCommand, error_options
from wanbuild.share.share_options import OciRequest, PullRequest, PushRequest
from wancli.click_options import given, made_options
from wancli.command import Checked, InputPath, OutputPath, fetch_all, takes_artifact, takes_overwrite
from wanhub.signature import KEY_PASSWORD, SIGNATURE, signer
from wanrun.claims import Place
from wanrun.errors import unwritable
from wanrun.rows import rows_of
from wanrun.terminal.lines import print_result, report

_BILL = Place(mark=re.compile(rb'\{(?s:(?=.*"bomFormat": "CycloneDX").*"wan:content-digest")'))


@click.command("oci", cls=Checked, options=lambda: made_options(rows_of(OciRequest)))
@takes_artifact()
@error_options
def oci_command(artifact: Path, **options: Any) -> None:
    """Writes an artifact as an OCI image layout, for registries and clusters."""
    from wanbuild.share.oci import write_layout

    request = OciRequest(artifact, **given(options))
    fetch_all(artifact, targets=request.targets)
    digest = write_layout(request, report)
    report(f"wrote {request.output}:{request.tag}, {digest}")


@click.command("push", cls=BuildCommand, options=lambda: made_options(rows_of(PushRequest)))
@click.argument("artifact", type=InputPath())
@click.argument("repository", metavar="OWNER/NAME")
@error_options
def push_command(artifact: Path, repository: str, **options: Any) -> None:
    """Publishes an artifact on the Hugging Face hub, with a model card."""
    from wanbuild.share.push import push

    request = PushRequest(artifact, repository, **given(options))
    fetch_all(artifact, targets=request.targets)
    address = push(request, report)
    report(f"pushed {address}")


@click.command("pull", cls=BuildCommand, options=lambda: made_options(rows_of(PullRequest)))
@click.argument("address")
@error_options
def pull_command(address: str, **options: Any) -> None:
    """Fetches an artifact's newest revision.

    ADDRESS is hf://OWNER/NAME[@REVISION], or the URL of its folder.
    """
    from wanbuild.share.pull import pull

    folder = pull(PullRequest(address, **given(options)), report)
    report(f"pulled into {folder}")


@click.command("sign", cls=Checked)
@takes_artifact()
@click.option(
    "--key",
    type=InputPath(),
    required=True,
    help=f"An elliptic curve key, PEM; if it is encrypted, with its password in {KEY_PASSWORD}.",
)
@error_options
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
@click.option("-o", "--output", type=OutputPath(_BILL), metavar="FILE", help="[default: standard output]")
@takes_overwrite
@click.option(
    "--licence", metavar="SPDX", help="Of the weights, such as Apache-2.0.  [default: that of a known source]"
)
@error_options
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
