"""The file that makes a folder a copy of a remote artifact."""

from __future__ import annotations

__all__ = ["is_copy"]

from pathlib import Path
from typing import Final

MARKER: Final = ".partial-copy.json"


def is_copy(folder: Path) -> bool:
    """Whether a folder is a copy, whose files may not all be there."""
    try:
        return (folder / MARKER).is_file()
    except OSError:
        return False
