"""The folder of weights that are outside the artifact."""

from __future__ import annotations

import contextlib
from pathlib import Path

from wanrun.errors import UsageError


def weights_folder(weights: str) -> Path:
    """Returns the folder that ``--weights`` names, with the contents of an artifact's ``weights`` folder.

    Cheap: it reads nothing, so a wrong ``--weights`` is refused before any long work. Raises UsageError if
    there is no such folder.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # nothing can have such a name
        if weights and (path := Path(weights).expanduser().resolve()).is_dir():
            return path
    remedy = "check --weights"
    if "://" in weights:
        weights, remedy = weights.partition("?")[0], "give the artifact's address: it is read from there"
    raise UsageError(
        "missing_file", f"there are no weights at {weights!r}", expected="a folder", remedy=remedy
    )
