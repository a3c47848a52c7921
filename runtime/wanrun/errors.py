"""The errors that both commands report, and the exit code each one ends with.

Every message is one line that names what is wrong, what was expected, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class WanError(Exception):
    """A failure that a user can act on.

    Args:
        what: what is wrong, naming the file, parameter or option.
        expected: what should have been there.
        found: what was there.
        remedy: what to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, what: str, *, expected: object = None, found: object = None, remedy: str | None = None
    ) -> None:
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.remedy is not None:
            parts.append(self.remedy)
        return " ".join("; ".join(parts).split())


class VerificationError(WanError):
    """Outputs differ from the recorded or reference ones (exit 1)."""

    exit_code = 1


class UsageError(WanError):
    """An option, an output path or an input file that cannot be used (exit 2)."""

    exit_code = 2


class ArtifactError(WanError):
    """The artifact is not usable here: mismatch, damage, or a profile that is not built (exit 3)."""

    exit_code = 3


class SourceError(WanError):
    """The source checkpoint is not usable, or the disk is full (exit 4)."""

    exit_code = 4


@dataclass(frozen=True)
class Mismatch:
    """One fact of this machine that differs from what a target was built for."""

    what: str
    expected: object
    found: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found} ({self.remedy})"


def artifact_mismatch(where: str, mismatches: Sequence[Mismatch]) -> ArtifactError:
    """One error that lists every mismatch, so that a user fixes them in one go."""
    return ArtifactError(f"{where} was not built for this machine: " + "; ".join(map(str, mismatches)))
