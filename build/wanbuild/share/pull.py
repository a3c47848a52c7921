"""Fetches an artifact in advance: all of it or what one machine needs, into the user's cache or a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wanbuild.conversion.orbax import add_metadata
from wanbuild.progress_line import ProgressLine
from wanbuild.share.share_options import PullRequest
from wanhub.copy import Copy
from wanhub.marker import MARKER
from wanhub.opening import open_newest
from wanhub.signature import MAX_MANIFEST_BYTES, SIGNATURE
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import UsageError, unwritable
from wanrun.files import read_bounded, replace_file, user_copies
from wanrun.machine.environment import host_mismatches

Report = Callable[[str], None]


def pull(request: PullRequest, report: Report) -> Path:
    """Moves the address's pin to its newest revision, and fetches it; returns the artifact's folder.

    Existing files are checked, and fetched again if they are damaged. A folder with only some of the targets
    stays a copy: a command fetches what it needs of the others. A folder that was whole stays whole. Raises
    ArtifactError if the address does not answer, or a file of it is damaged, and UsageError for an unknown
    target, none that fits, or a folder that is something else.
    """
    if request.targets and request.whole:
        raise UsageError(
            "conflict", "--target and --all-targets exclude each other", remedy="pass one of them"
        )
    if request.output is not None:
        _check_folder(request.output)
    opened = open_newest(request.address, user_copies(), report)
    artifact = open_artifact(opened.folder)
    names = request.targets or (None if request.whole else _fitting(artifact))
    chosen = artifact.only(targets=names)
    if request.output is not None:
        artifact = replace(artifact, folder=_begun(request.output, artifact.folder))
    copy, files = Copy(artifact, report), list(chosen.named())
    copy.discard_damaged(files)
    missing = copy.missing(files)
    with ProgressLine(sum(one.nbytes or 0 for one in missing), "fetch") as progress:
        copy.fetch(files, progress.advance)
    opened.pin(report)
    came = f"{copy.store.requests} requests, {copy.store.nbytes:,} bytes"
    report(f"{came}; targets: {', '.join(chosen.manifest.targets)}")
    if request.output is not None:
        _finish(artifact)
    return artifact.folder


def _fitting(artifact: Artifact) -> list[str]:
    """Returns the targets that fit this machine. Raises UsageError if there is none."""
    reasons, fitting, manifest = [], [], artifact.manifest
    for name, target in sorted(manifest.targets.items()):
        mesh = manifest.program_sets[target.program_set].mesh
        requirements = artifact.folder / target.requirements.file
        differs = host_mismatches(target.environment, requirements, num_devices(mesh))
        if differs:
            reasons.append(SelectedTarget(name, target, tuple(differs)).reason)
        else:
            fitting.append(name)
    if not fitting:
        raise UsageError(
            "wrong_machine",
            f"no target of {artifact} fits this machine",
            found=", ".join(reasons) or "no targets",
            remedy="name those that you want: --target T, or --all-targets",
        )
    return fitting


def _check_folder(folder: Path) -> None:
    """Raises UsageError for a folder that is neither empty nor an artifact."""
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(
                "exists", f"{folder} is not empty, and not an artifact", remedy="choose a new folder"
            )
    except OSError as error:
        raise unwritable(f"the folder {folder}", error, "choose another folder") from error


def _begun(folder: Path, cached: Path) -> Path:
    """Makes a folder a copy of the same artifact as the cached one, or continues such a copy."""
    manifest = (cached / MANIFEST).read_bytes()
    try:
        there = folder / MANIFEST
        if there.exists() and read_bounded(there, MAX_MANIFEST_BYTES) != manifest:
            raise UsageError(
                "exists", f"{folder} is another artifact, or another revision", remedy="choose a new folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(cached / MARKER, folder / MARKER)
        shutil.copymode(cached / MARKER, folder / MARKER)
        if (cached / SIGNATURE).exists():
            shutil.copyfile(cached / SIGNATURE, folder / SIGNATURE)
        replace_file(folder / MANIFEST, manifest)
    except OSError as error:
        raise unwritable(f"the folder {folder}", error, "choose another folder") from error
    return folder


def _finish(artifact: Artifact) -> None:
    """Writes the files that plain Orbax needs next to the weights; removes a whole artifact's marker."""
    add_metadata(artifact)
    try:
        if all(artifact.path(one).is_file() for one in artifact.named()):
            (artifact.folder / MARKER).unlink()
    except OSError as error:
        raise unwritable(f"the folder {artifact}", error) from error
