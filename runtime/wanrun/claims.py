"""The files that a run reads and writes: no file is read and written, and none is written twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from wanrun.errors import UsageError


class Claims:
    """Notes the files that are read and written.

    Args:
        artifact: the artifact's folder, in which no output may lie.
    """

    def __init__(self, artifact: Path) -> None:
        self._artifact = Path(os.path.realpath(artifact))
        self._written: dict[str, str] = {}
        self._read: dict[str, str] = {}

    def read(self, path: Path, owner: str) -> None:
        """Notes that a file or a folder of frames, which may lie anywhere, is read for ``owner``."""
        self._read.setdefault(os.path.realpath(path), owner)

    def write(self, paths: Sequence[Path | None], owner: str) -> None:
        """Notes that these files are written for ``owner``; None means no file.

        Raises:
            UsageError: if a file is already one of the written files, is read, or lies inside the artifact.
        """
        names: dict[str, Path] = {}
        for path in paths:
            if path is None:
                continue
            name = os.path.realpath(path)
            self._check_not_read(path, name)
            other = owner if name in names else self._written.get(name)
            if other is not None:
                raise UsageError(
                    f"the output {path} is also that of {other or 'this prompt'}",
                    remedy="give each its own name, for example with {index}",
                )
            if Path(name).is_relative_to(self._artifact):
                raise UsageError(f"{path} lies inside the artifact", remedy="write the results elsewhere")
            names[name] = path
        self._written |= dict.fromkeys(names, owner)

    def _check_not_read(self, path: Path, name: str) -> None:
        """Raises UsageError if a file of this real name is read, or lies in a folder of read frames."""
        if name in self._read:
            raise UsageError(
                f"the output {path} is also that of {self._read[name]}, which is read",
                remedy="choose another output",
            )
        folder = os.path.dirname(name)  # noqa: PTH120 - a real path
        if folder in self._read:
            raise UsageError(
                f"the output {path} lies inside the folder of {self._read[folder]}, which is read",
                remedy="write the results elsewhere",
            )
