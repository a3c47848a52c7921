"""The files that a manifest lists, and other files in the folders where only those belong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from wanhub.expected import expected_files
from wanrun.artifact.manifest import Manifest

REBUILT = ("programs", "executables", "golden", "embeddings")
"""The folders in which a build removes files that the manifest does not list."""

REQUIREMENTS = "requirements*.txt"
"""Beside them, the files of package versions."""


def listed_files(manifest: Manifest) -> set[str]:
    """Returns every file that the manifest lists, except for weights, as paths relative to the artifact."""
    return {name for name, one in expected_files(manifest).items() if one.parameter is None}


def unlisted(artifact: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields files and folders that the manifest does not imply, in the places where nothing else belongs.

    These places are the tokenizer's folder, the folders of ``REBUILT``, and names like a requirements file's.
    Other files beside the manifest, such as a licence, are the user's. Links are followed, as a run follows
    them; of a folder that does not belong there, its content is not listed.
    """
    files = listed_files(manifest)
    implied = files | {str(parent) for name in files for parent in PurePosixPath(name).parents}
    tokenizer = PurePosixPath(manifest.tokenizer.file).parts
    for root in (*REBUILT, *tokenizer[: len(tokenizer) > 1]):
        for folder, folders, names in os.walk(artifact / root, followlinks=True):
            place = Path(folder)
            for name in sorted((*folders, *names)):
                if (place / name).relative_to(artifact).as_posix() not in implied:
                    yield place / name
            folders[:] = [
                name for name in folders if (place / name).relative_to(artifact).as_posix() in implied
            ]
    yield from (path for path in sorted(artifact.glob(REQUIREMENTS)) if path.name not in files)
