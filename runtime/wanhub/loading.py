"""Artifacts at addresses: opened by their manifest, then fetched, and loaded like any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wanrun
from wanhub.marker import is_copy
from wanhub.url_reader import Report, quiet
from wanrun.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from wanrun import Pipeline

Fetching = Callable[[Callable[[], tuple[int, int]]], AbstractContextManager[object]]
"""Shows the fetching of files while the block runs: gets a function of the bytes that came, and of all."""


def find(place: str | os.PathLike[str], report: Report = quiet) -> Path:
    """Returns the folder of an artifact: of a path, itself; of an address, the copy in the user's cache.

    A copy has the manifest; ``fetch`` brings the other files.

    Args:
        place: a path; ``hf://OWNER/NAME[@REVISION]``, or the URL of an artifact's folder.
        report: gets a line for a revision that was not pinned before, and one about a wait.

    Raises:
        ArtifactError, UsageError: as ``wanhub.opening.open_copy``; UsageError for a missing package.
    """
    text = os.fspath(place)
    if "://" not in text:
        return Path(text)
    try:
        from wanhub.opening import open_copy

        return open_copy(text, wanrun.user_copies(), report)
    except ModuleNotFoundError as error:
        remedy = "pip install '.[hub]' in the checkout"
        raise UsageError("not_installed", f"{text} needs {error.name}", remedy=remedy) from None


def open_artifact(place: str | os.PathLike[str], report: Report = quiet) -> wanrun.Artifact:
    """Opens an artifact by its manifest, wherever it is; arguments as for ``find``.

    Raises:
        ArtifactError: if there is none, or it is damaged.
        UsageError: as ``find``.
    """
    folder = find(place, report)
    if not is_copy(folder):
        return wanrun.open_artifact(folder)
    from wanhub.origin import read_copied, read_origin

    if (origin := read_origin(folder)) is None:
        return wanrun.open_artifact(folder)
    return read_copied(folder, f"the copy {folder}", f"remove {folder}, and fetch it again", origin.address)


def _opened(artifact: str | os.PathLike[str] | wanrun.Artifact) -> wanrun.Artifact:
    return artifact if isinstance(artifact, wanrun.Artifact) else open_artifact(artifact)


def fetch(
    artifact: str | os.PathLike[str] | wanrun.Artifact,
    names: Iterable[wanrun.Named],
    report: Report = quiet,
    showing: Fetching | None = None,
) -> None:
    """Fetches missing files of a partial copy; does nothing for a whole artifact.

    Args:
        artifact: the artifact, as from ``open_artifact``; or its place, as for ``find``.
        names: its files, such as those of ``wanrun.needed``; all files of a parameter or none.
        report: gets a line about a wait, from any thread.
        showing: shows how many bytes have come, if any are missing.

    Raises:
        ArtifactError, UsageError: as ``wanhub.copy.Copy.fetch``.
    """
    artifact = _opened(artifact)
    if not artifact.origin:
        return
    from wanhub.copy import Copy

    copy, files = Copy(artifact, report), [one for one in names if artifact.has(one)]
    if not (missing := copy.missing(files)):
        return
    came, total = list[int](), sum(one.nbytes or 0 for one in missing)  # of some it is not known
    with nullcontext() if showing is None else showing(lambda: (sum(came), max(total, sum(came)))):
        copy.fetch(files, came.append)


def load(place: str | os.PathLike[str], **loading: Any) -> Pipeline:
    """Loads an artifact wherever it is, after fetching what all its profiles need on this machine's target.

    Args:
        place: as for ``find``.
        loading: keywords of ``wanrun.load``.

    Raises:
        ArtifactError, UsageError: as ``open_artifact``, ``fetch`` and ``wanrun.load``.
    """
    report = loading.get("report") or quiet
    artifact = open_artifact(place, report)
    if artifact.origin:
        fetch(artifact, wanrun.needed(artifact, loading), report)
    return wanrun.load(artifact, **loading)


def check_signed(
    artifact: str | os.PathLike[str] | wanrun.Artifact, public_key: str | os.PathLike[str]
) -> None:
    """Checks that an artifact was signed with a key, and that its files are those that were (extra ``sign``).

    Of a copy it checks the files that are there; others are compared as they come. Load it with
    ``verify="sha256"`` then.

    Args:
        artifact: the artifact; or its place, as for ``find``.
        public_key: an elliptic curve key, PEM.

    Raises:
        ArtifactError: if it is not signed, by another key, or if a file is missing or differs.
        UsageError: if ``public_key`` is not a key, or the extra is not installed.
    """
    from wanhub.signature import MANIFEST, check_signature
    from wanrun.artifact.manifest import manifest_of

    artifact = _opened(artifact)
    signed = manifest_of(check_signature(artifact.folder, Path(public_key)), artifact.folder / MANIFEST)
    if signed != artifact.manifest:
        raise ArtifactError(
            "changed",
            f"{artifact} was changed while its signature was checked",
            expected=artifact.manifest.manifest_digest,
            found=signed.manifest_digest,
            remedy="run it again",
        )
    artifact.check_all(artifact.named(), missing=bool(artifact.origin))
