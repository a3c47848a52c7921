"""The commands that look at an artifact: ``wanbuild verify``, ``attest``, ``embed`` and ``inspect``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from wanbuild.build_command import BuildCommand, error_options
from wancli.command import Checked, InputPath, OutputPath, fetch_all, takes_artifact, takes_overwrite
from wanrun.claims import REPORT, Place
from wanrun.errors import UsageError
from wanrun.terminal.lines import print_result, report, warn

_OUTCOME = Place(
    mark=re.compile(
        rb'\{\n  ("profiles": \{(\}\n|\n    "\d+x\d+x\d+-)|"recorded": true\n\}'
        rb'|"[^"]+": \{\n    "error": .+\n    "limit": )'
    )
)


@click.command("verify", cls=BuildCommand)
@takes_artifact()
@click.option("--record", is_flag=True, help="Write golden/ instead of replaying it.")
@click.option(
    "--source",
    type=InputPath(str, tree=True),
    metavar="CHECKPOINT",
    help="Compare with diffusers on this checkpoint, a folder or a hub id.",
)
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Steps for --source.")
@click.option("--json", "json_file", type=OutputPath(_OUTCOME), help="Write the outcome to this file.")
@click.option("--report", "page", type=OutputPath(REPORT), help="Write a page about the outcome (.html).")
@takes_overwrite
@error_options
def verify_command(
    artifact: Path, record: bool, source: str | None, steps: int, json_file: Path | None, page: Path | None
) -> None:
    """Checks every file, and replays the recorded results."""
    import json

    from wanrun.files import replace_file

    verdict = "verified"
    if record and source is not None:
        raise UsageError("conflict", "--record and --source exclude each other", remedy="run verify twice")
    outcome = _outcome(artifact, record, source, steps, page)
    if outcome == {"profiles": {}}:
        verdict = "is whole, and nothing was replayed"
    if json_file is not None:
        replace_file(json_file, (json.dumps(outcome, indent=2, sort_keys=True) + "\n").encode())
    report(f"{artifact} {verdict}")


def _outcome(
    artifact: Path, record: bool, source: str | None, steps: int, page: Path | None
) -> dict[str, Any]:
    """Verifies, writes the report, and returns the outcome for ``--json``."""
    from wanbuild.check import verify as verification
    from wanbuild.check.findings import Findings, reported

    if not record:  # --record refuses an artifact that is elsewhere
        fetch_all(artifact)
    findings = Findings()
    say = report if page is None else findings.saying(report)
    kept = None if page is None else findings
    if record:
        with reported(page, artifact, findings, "Every file is whole, and golden/ was recorded"):
            verification.record(artifact, say, kept)
        return {"recorded": True}
    if source is not None:
        from wanbuild.check.reference import compare_with_reference

        with reported(page, artifact, findings, "The artifact agrees with diffusers"):
            return compare_with_reference(artifact, source, steps, say, kept)
    with reported(page, artifact, findings, "Every file is whole, and what was replayed agrees with golden/"):
        return {"profiles": verification.replay(artifact, say, kept)}


@click.command("attest", cls=Checked)
@takes_artifact()
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="Repeatable; a built profile.  [default: all]",
)
@click.option(
    "--record", is_flag=True, help="Put the verdicts into the artifact, for all machines of this one's kind."
)
@error_options
def attest_command(artifact: Path, profiles: tuple[str, ...], record: bool) -> None:
    """Tries executables that were built elsewhere on this machine's chip."""
    from wanbuild.check.attest import attest

    if not record:  # --record refuses an artifact that is elsewhere
        fetch_all(artifact)
    attest(artifact, profiles, record, report)


@click.command("embed", cls=Checked)
@takes_artifact()
@click.option("--prompt", "prompts", multiple=True, help="Repeatable.  [default: the negative prompt]")
@error_options
def embed_command(artifact: Path, prompts: tuple[str, ...]) -> None:
    """Adds prompt embeddings, which need no text encoder later."""
    from wanbuild.check.embed import embed_prompts

    manifest = embed_prompts(artifact, prompts, report, warn)
    report(f"{artifact} has {len(manifest.embeddings)} prompt embedding(s)")


@click.command("inspect", cls=Checked)
@takes_artifact()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@error_options
def inspect_command(artifact: Path, as_json: bool) -> None:
    """Prints the contents of an artifact."""
    import json

    from wanbuild.check.inspect import summary, table
    from wanrun.artifact.artifact import open_artifact
    from wanrun.artifact.overlay import overlaid

    found = overlaid(open_artifact(artifact))
    built = () if found.built is None else found.built.profiles
    if as_json:
        print_result(*json.dumps(summary(found.manifest, built), indent=2, sort_keys=True).split("\n"))
    else:
        print_result(*table(found.manifest, built))
