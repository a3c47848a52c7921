"""A fault: what is done to which command, and what may come of it."""

from __future__ import annotations

import hashlib
import random
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENTED = {0, 1, 2, 3, 4, 129, 130, 141, 143}
"""Exit codes of the commands (``wanrun.console``)."""

LIMIT_SECONDS = 60.0
SIGNAL_SECONDS = 5.0
"""From a signal to the end of the process."""


@dataclass
class Case:
    """One fault, prepared in a folder of its own.

    Attributes:
        kind: the family of faults.
        what: the fault in words, for the log.
        command: ``wanrun`` or ``wanbuild``.
        arguments: of the command.
        output: the video that the command writes, if it writes one.
        artifact: the artifact that has to be whole afterwards, if any.
        environment: variables that differ; None removes one.
        process: whether it needs a process of its own.
        shell: appended to the command line, which a shell then runs: redirections.
        signal: sent to the process.
        after_seconds: when it is sent.
        codes: exit codes that are right.
        clean: folders in which no temporary file may stay.
    """

    kind: str
    what: str
    command: str
    arguments: Sequence[str]
    output: Path | None = None
    artifact: Path | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    process: bool = False
    shell: str = ""
    signal: signal.Signals | None = None
    after_seconds: float = 0.0
    codes: frozenset[int] = frozenset({0, 2, 3, 4})
    clean: Sequence[Path] = ()


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: the exit code; minus a signal's number where one ended it, and None where nothing did in time.
        seconds: that it took; of a case with a signal, since the signal.
        out: stdout.
        err: stderr.
    """

    code: int | None
    seconds: float
    out: str
    err: str


Maker = Callable[[random.Random, Path], Case]
"""Prepares a fault in an empty folder."""


def rng_of(seed: int, number: int) -> random.Random:
    """The random numbers of one fault, which repeat it."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def problems(case: Case, ended: Ended, expected: bytes, whole: Callable[[Path], str | None]) -> list[str]:
    """What is wrong with how a command ended; empty if it survived the fault.

    Args:
        case: the fault.
        ended: how its command ended.
        expected: the video of an undamaged artifact.
        whole: says what is wrong with an artifact, None for a whole one.
    """
    found = []
    if ended.code is None:
        return [f"hangs: no end in {LIMIT_SECONDS:.0f} s"]
    if ended.code < 0 and _signalled(case, ended.code):
        return []  # Python has a traceback of its own
    if ended.code not in DOCUMENTED:
        found.append(f"exit code {ended.code}")
    elif ended.code not in case.codes and not _signalled(case, ended.code):
        found.append(f"exit code {ended.code}, which is not one of {sorted(case.codes)}")
    if ended.code < 0 and _signalled(case, ended.code):
        return found  # Python prints a traceback of its own
    errors = [line for line in ended.err.splitlines() if not _expected_line(line)]
    if ended.code == 0:
        errors = [line for line in errors if line.startswith(("error", "Traceback"))]
    if len(errors) > (ended.code != 0):
        found.append(f"{len(errors)} lines on stderr")
    if "internal error" in ended.err or "Traceback" in ended.err:
        found.append("an internal error")
    if case.signal is not None and ended.seconds > SIGNAL_SECONDS:
        found.append(f"{ended.seconds:.1f} s from the signal to the end")
    if case.output is not None and case.output.is_file() and case.output.read_bytes() != expected:
        found.append("another video")
    if ended.code == 0 and case.output is not None and not case.output.is_file():
        found.append("exit code 0 and no video")
    if case.artifact is not None and (wrong := whole(case.artifact)) is not None:
        found.append(f"half an artifact: {wrong}")
    found += [f"left {path}" for folder in case.clean for path in left_in(folder)]
    return found


def _signalled(case: Case, code: int) -> bool:
    """Whether the signal ended the process; it did so by itself where Python had no line of ours run."""
    if case.signal is None:
        return False
    return code == 128 + case.signal or (code == -case.signal and case.after_seconds < 0.5)


def _expected_line(line: str) -> bool:
    """Whether a line is progress or a warning, of which a command may print any number."""
    return bool(re.match(r"(warning: |convert: |denoise: |experts: |\d+ of \d+)", line)) or not line.strip()


def left_in(folder: Path) -> list[Path]:
    """Temporary files, locks and half-built folders."""
    if not folder.is_dir():
        return []
    names = re.compile(r"\.(wan-.*|.*\.(lock|building|replaced))|core(\.\d+)?")
    return [path for path in folder.rglob("*") if names.fullmatch(path.name)]
