"""The errors that both commands report, and their exit codes.

Every message is one line that names what is wrong, what was expected, what was found and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from wanrun.codes import ErrorCode

_FIELD = re.compile("\x02(\\w+)\x03")


def field(name: str) -> str:
    """Marks a generation option, by its Python name, in an error's text; ``WanError.spelled`` spells it."""
    return f"\x02{name}\x03"


def shortened(text: str, limit: int = 60) -> str:
    """Returns the beginning of a text, quoted for a message."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def escaped(text: str) -> str:
    """Returns a text that is one line on every terminal: characters that are not shown are escaped.

    A file's name may have a line feed, a terminal's control sequence, or a byte that is not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def quoted(value: Any, limit: int = 60) -> str:
    """Returns a value as JSON for a message, cut if it is long."""
    if isinstance(value, Mapping):
        return "an object"
    try:
        short = value[: limit + 1] if isinstance(value, str) else value  # of megabytes, maybe
        text = json.dumps(short, default=lambda other: type(other).__name__)
    except (ValueError, RecursionError):  # a list inside itself; an integer of more digits than Python prints
        return f"a large {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."


def _spelled(text: str, spell: Callable[[str], str]) -> str:
    return _FIELD.sub(lambda match: spell(match[1]), text)


class WanError(Exception):
    """A failure that a user can act on.

    An error refers to options as fields (``field``), which ``str`` shows by their Python names. Code that
    prints the error for the author of a command line or a JSON line calls ``spelled``.

    Args:
        code: the kind of error, for programs.
        what: what is wrong, naming the file, parameter or option.
        expected: what should have been there.
        found: what was there.
        remedy: what to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        code: ErrorCode,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        self.code, self.what, self.expected, self.found, self.remedy = code, what, expected, found, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.spelled(str)

    @property
    def fields(self) -> tuple[str, ...]:
        """The Python names of the options in the message, each once."""
        return tuple(dict.fromkeys(_FIELD.findall(self.text)))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Returns the message with ``spell`` applied to each option's Python name."""
        return _spelled(self.text, spell)

    def words(self, spell: Callable[[str], str] = str) -> dict[str, str]:
        """Returns those of ``expected``, ``found`` and ``remedy`` that the message has, spelled alike."""
        return {
            name: _spelled(" ".join(str(part).split()), spell)
            for name in ("expected", "found", "remedy")
            if (part := self.parts[name]) is not None
        }

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments of the error by name, to make one with another part."""
        words = {"what": self.what, "expected": self.expected, "found": self.found, "remedy": self.remedy}
        return {"code": self.code, **words}

    def again(self) -> Self:
        """Returns the same error without its traceback, which keeps what its frames refer to."""
        return type(self)(**self.parts)

    def located(self, where: str) -> Self:
        """Returns the same error with the location, a line of a file, in front."""
        return type(self)(**{**self.parts, "what": f"{where}: {self.what}"})

    @property
    def text(self) -> str:
        """The message with its fields unspelled, for use in another error's text."""
        parts = [self.what]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.remedy is not None:
            parts.append(self.remedy)
        return " ".join("; ".join(parts).split())


class VerificationError(WanError):
    """Outputs differ from the recorded ones or the reference (exit 1)."""

    exit_code = 1


class UsageError(WanError):
    """An option, an output path or an input file that cannot be used (exit 2)."""

    exit_code = 2


def wrong_type(name: str, expected: str, found: object, remedy: str | None = None) -> UsageError:
    """Returns the error for an argument of a wrong type."""
    what = f"{name} has the wrong type"
    return UsageError("wrong_type", what, expected=expected, found=quoted(found), remedy=remedy)


def together(problems: Sequence[UsageError]) -> UsageError:
    """Returns one error that names every problem, with their code if all have the same."""
    if len(problems) == 1:
        return problems[0]
    codes: set[ErrorCode] = {problem.code for problem in problems}
    code = codes.pop() if len(codes) == 1 else "invalid_value"
    return UsageError(code, "; ".join(problem.text for problem in problems))


class NoSpaceError(UsageError):
    """The disk or the quota of an output is full, or a file reaches the largest size (exit 4)."""

    exit_code = 4


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def lacks_space(error: BaseException) -> bool:
    """Whether a file could not be written because the disk or the quota is full, or it would be too large.

    The largest size is a limit of the process (``ulimit -f``) or of the file system.
    """
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def errno_in(text: str) -> int:
    """Returns the number of the error of ``lacks_space`` that a text quotes; EIO if it quotes none.

    Programs and libraries that are not Python's only give the system's words.
    """
    return next((number for number in _NO_SPACE if os.strerror(number) in text), errno.EIO)


def space_told(error: OSError) -> str:
    """Returns what is lacking, and what to do, for an error of ``lacks_space``."""
    where = f" at {escaped(str(error.filename))}" if error.filename else ""
    if error.errno == errno.EFBIG:
        what, remedy = "a file has reached the largest size (File too large)", "raise the limit (ulimit -f)"
    else:
        what, remedy = "the disk is full", "free some space"
    return f"{what}{where}; {remedy} and run it again"


def unwritable(what: str, error: OSError, remedy: str | None = None) -> UsageError:
    """Returns the error of a file that cannot be written, a NoSpaceError if there is no space for it.

    ``what`` is the file, such as ``the latents a.npy``. If there is no space, ``remedy`` follows the advice
    to free some.
    """
    if lacks_space(error):
        problem, space = f"there is no space left to write {what}", "free some"
        if error.errno == errno.EFBIG:
            problem, space = f"{what} reaches the largest size of a file", "raise the limit (ulimit -f)"
        return NoSpaceError("no_space", problem, remedy=space if remedy is None else f"{space}, or {remedy}")
    found = error.strerror or error
    return UsageError("unwritable", f"{what} cannot be written", found=found, remedy=remedy)


class ArtifactError(WanError):
    """The artifact is not usable here: mismatch, damage, or a profile that is not built (exit 3)."""

    exit_code = 3


class OtherReleaseError(ArtifactError):
    """Another release wrote the artifact, and this one cannot read it (exit 3)."""


class AdapterError(ArtifactError):
    """An adapter that was chosen is damaged, gone or another one; without it the artifact runs (exit 3)."""


class SourceError(WanError):
    """The source checkpoint is not usable, or there is no space (exit 4)."""

    exit_code = 4


class ClusterError(WanError):
    """Another process of a run of several failed, is gone or is silent, or has never come (exit 5)."""

    exit_code = 5


class CancelledError(WanError):
    """The caller has cancelled the generation by its token."""

    exit_code = 130


@dataclass(frozen=True)
class Mismatch:
    """One fact in which this machine differs from a target's."""

    what: str
    expected: object
    found: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found} ({self.remedy})"


def artifact_mismatch(where: str, mismatches: Sequence[Mismatch]) -> ArtifactError:
    """Returns one error that lists every mismatch, so that a user fixes them in one go."""
    what = f"{where} was not built for this machine: " + "; ".join(map(str, mismatches))
    return ArtifactError("wrong_machine", what)


def lost_process(found: str | None = None) -> ClusterError:
    """Returns the error of a process that JAX has ended, mostly because it has lost another one."""
    return ClusterError(
        "process_lost",
        "another process of this run has ended or cannot be reached, or JAX has failed in this one",
        found=found,
        remedy="see what the others say; --debug shows what JAX says",
    )
