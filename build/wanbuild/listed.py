"""Finds files that a manifest does not list, in folders where nothing else belongs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.named import ADAPTER, EMBEDDING, EXECUTABLE, GOLDEN, PROGRAM, VERDICT

REBUILT = tuple(kind.folder for kind in (PROGRAM, EXECUTABLE, GOLDEN, EMBEDDING, ADAPTER, VERDICT))
"""The folders in which a build removes files that the manifest does not list."""

REQUIREMENTS = "requirements*.txt"
"""Beside them, the files of package versions."""


def unlisted(artifact: Artifact) -> Iterator[Path]:
    """Yields files and folders that the manifest does not imply, in the places where nothing else belongs.

    These places are the tokenizer's folder, the folders of ``REBUILT``, and names like a requirements file's.
    Other files next to the manifest, such as a licence, are the user's. Links are followed, as a run does. A
    folder that does not belong there is yielded without its content.
    """
    root, files = artifact.folder, {one.name for one in artifact.named()}
    implied = files | {str(parent) for name in files for parent in PurePosixPath(name).parents}
    tokenizer = PurePosixPath(artifact.manifest.tokenizer.file).parts
    for own in (*REBUILT, *tokenizer[: len(tokenizer) > 1]):
        for folder, folders, names in os.walk(root / own, followlinks=True):
            place = Path(folder)
            for name in sorted((*folders, *names)):
                if (place / name).relative_to(root).as_posix() not in implied:
                    yield place / name
            folders[:] = [name for name in folders if (place / name).relative_to(root).as_posix() in implied]
    yield from (path for path in sorted(root.glob(REQUIREMENTS)) if path.name not in files)
