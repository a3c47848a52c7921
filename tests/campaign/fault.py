"""A fault: what is done to which commands, and what may come of it."""

from __future__ import annotations

import hashlib
import random
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENTED = {0, 1, 2, 3, 4, 129, 130, 141, 143}
"""Exit codes of the commands (``wancli.console``)."""

LIMIT_SECONDS = 60.0
SIGNAL_SECONDS = 5.0
"""From a signal to the end of the process."""

FINISHED_SECONDS = 1.0
"""A command that had done its work when the signal came has ended by then."""

EARLY_SECONDS = 0.5
"""Before this, Python itself may still be starting, whose own words and ways a signal then meets."""


@dataclass(frozen=True)
class Call:
    """One command line.

    Attributes:
        command: ``wanrun`` or ``wanbuild``.
        arguments: of the command.
        codes: exit codes that are right.
        output: the video that the command writes, if it writes one as .npy.
        environment: variables that differ; None removes one.
        limits: soft limits of the process, by the name of ``resource``'s constant.
        shell: appended to the command line, which a shell then runs: redirections.
    """

    command: str
    arguments: Sequence[str]
    codes: Collection[int] = frozenset({0})
    output: Path | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    shell: str = ""

    def __str__(self) -> str:
        words = [word for word in self.arguments[:1] if self.command == "wanbuild"]
        return " ".join([self.command, *words])


@dataclass(frozen=True)
class Case:
    """One fault, prepared in a folder of its own.

    Attributes:
        kind: the family of faults.
        what: the fault in words, for the log.
        calls: the commands; several run at once.
        expected: the videos that are right, each as the bytes of its file.
        process: whether each command needs a process of its own.
        signal: sent to the first command.
        after_seconds: when it is sent.
        again: a command that runs afterwards, as a user would repeat it.
        artifact: the artifact that has to be whole afterwards, or absent.
        clean: folders in which no temporary file may stay.
        kept: files of the user, and what they hold.
    """

    kind: str
    what: str
    calls: Sequence[Call]
    expected: Collection[bytes] = ()
    process: bool = False
    signal: signal.Signals | None = None
    after_seconds: float = 0.0
    again: Call | None = None
    artifact: Path | None = None
    clean: Sequence[Path] = ()
    kept: Mapping[Path, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: the exit code; minus a signal's number where one ended it, and None where nothing did in time.
        seconds: that it took; after a signal, since the signal.
        err: stderr.
        sent_after: seconds from the start to the signal; None if none was sent before the end.
    """

    code: int | None
    seconds: float
    err: str
    sent_after: float | None = None


Maker = Callable[[random.Random, Path], Case]
"""Prepares a fault in an empty folder."""


def rng_of(seed: int, number: int) -> random.Random:
    """The random numbers of one fault, which repeat it."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def problems(case: Case, ended: Sequence[Ended], whole: Callable[[Path], str | None]) -> list[str]:
    """What is wrong with how the commands ended; empty if they survived the fault.

    Args:
        case: the fault.
        ended: how its commands ended, and after them the one that ran again.
        whole: says what is wrong with an artifact, None for a whole one.
    """
    found = []
    calls = [*case.calls, *([case.again] if case.again is not None else [])]
    for call, one in zip(calls, ended, strict=True):
        name = "" if len(calls) == 1 else f"{call}: "
        found += [name + problem for problem in _of_call(call, one, case.signal)]
        if call.output is not None and call.output.is_file():
            if call.output.read_bytes() not in case.expected:
                found.append(f"{name}another video")
        elif call.output is not None and one.code == 0:
            found.append(f"{name}exit code 0 and no video")
    if case.artifact is not None and (wrong := whole(case.artifact)) is not None:
        found.append(f"half an artifact: {wrong}")
    for path, content in case.kept.items():
        if not path.is_file() or path.read_bytes() != content:
            found.append(f"changed {path}")
    if case.signal is not signal.SIGKILL or case.again is not None:
        found += [f"left {path}" for folder in case.clean for path in left_in(folder)]
    return found


def _of_call(call: Call, ended: Ended, sent: signal.Signals | None) -> list[str]:
    """What is wrong with a command's exit code and its words.

    Args:
        call: the command.
        ended: how it ended.
        sent: the signal of the case.
    """
    if ended.code is None:
        return [f"hangs: no end in {LIMIT_SECONDS:.0f} s"]
    if sent is signal.SIGINT and _in_python_s_own_start(ended):
        return []
    found = []
    if sent is not None and ended.sent_after is not None and ended.code in (-sent, 128 + sent):
        if sent is signal.SIGKILL or (ended.code < 0 and ended.sent_after < EARLY_SECONDS):
            return []
        if ended.code < 0:
            found.append(f"{sent.name} ended it without a word")
        if ended.seconds > SIGNAL_SECONDS:
            found.append(f"{ended.seconds:.1f} s from the signal to the end")
    elif sent is not None and ended.sent_after is not None and ended.seconds > FINISHED_SECONDS:
        found.append(f"{sent.name} was ignored: exit code {ended.code} after {ended.seconds:.1f} s")
    elif ended.code not in DOCUMENTED:
        found.append(f"exit code {ended.code}")
    elif ended.code not in call.codes:
        found.append(f"exit code {ended.code}, which is not one of {sorted(call.codes)}")
    errors = [line for line in ended.err.splitlines() if not _expected_line(line)]
    if ended.code == 0:
        errors = [line for line in errors if line.startswith(("error", "Traceback"))]
    if len(errors) > (ended.code != 0):
        found.append(f"{len(errors)} lines on stderr")
    if "internal error" in ended.err or "Traceback" in ended.err:
        found.append("an internal error")
    return found


def _in_python_s_own_start(ended: Ended) -> bool:
    """Whether Ctrl-C met Python before any of our modules: it ends with 1 where it imports ``site``."""
    early = ended.sent_after is not None and ended.sent_after < EARLY_SECONDS
    ours = re.search(r"/wan(build|cli|fleet|hub|report|run|serve)/", ended.err)
    return early and ended.code == 1 and ended.err.rstrip().endswith("KeyboardInterrupt") and not ours


def _expected_line(line: str) -> bool:
    """Whether a line is progress or a warning, of which a command may print any number."""
    return (
        bool(
            re.match(
                r"(warning: |waiting: |convert: |denoise: |experts: |\d+ of \d+|\w+://\S+, manifest sha256:)",
                line,
            )
        )
        or not line.strip()
    )


def left_in(folder: Path) -> list[Path]:
    """Temporary files, locks and half-built folders."""
    if not folder.is_dir():
        return []
    names = re.compile(r"\.(wan-.*|.*\.(lock|building|replaced))|core(\.\d+)?")
    return [path for path in folder.rglob("*") if names.fullmatch(path.name)]
