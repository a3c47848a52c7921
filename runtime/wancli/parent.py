"""The parent of a command in a run of several processes, which remains when JAX has ended the command.

JAX's service ends the process from C++ when another one is gone. So the command starts itself again as a
child. The parent, which has no JAX, passes signals on, and prints the error that the child ends with: JAX may
end that before or after it has. If the child was ended without an exit code, the parent removes its
leftovers, and says so if no error was reported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from wancli.early import WORDS
from wancli.error_line import JSON_ERRORS, error_line
from wanrun.errors import ClusterError, lost_process
from wanrun.temporary import remove_abandoned
from wanrun.undo import end, stand_still

OPTIONS = ("--distributed", "--coordinator", "--num-processes", "--process-id")
"""The options of a run of several processes."""

CHILD = "WANRUN_CHILD"
"""The child's environment variable with the number of the file in which it reports to the parent."""

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "4"}
"""Silences the stack trace that C++ prints."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


class _Told:
    """The file in which this process reports to its parent; None without a parent."""

    file: int | None = None


_TOLD = _Told()


def run_with_parent() -> None:
    """Makes this process the parent of its command, if that is of several processes, until both end.

    It returns in the child, and in a command of one process. Signals are handled already: the child was
    started with them blocked.
    """
    _TOLD.file = _open_file(os.environ.pop(CHILD, ""))  # a command that this one runs is not a child
    named = {argument.partition("=")[0] for argument in sys.argv}
    if _TOLD.file is None and not named.isdisjoint(OPTIONS):
        _run_as_child()
    if _TOLD.file is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORDS)


def _open_file(number: str) -> int | None:
    """Returns the number of an open file; None if it is not one."""
    try:
        os.fstat(int(number))
    except (ValueError, OverflowError, OSError):
        return None
    return int(number)


def _run_as_child() -> NoReturn:
    """Runs this command again as a child, and ends this process in the same way."""
    import ctypes
    import subprocess

    told = os.memfd_create("told")
    quiet = {} if "--debug" in sys.argv else _QUIET
    child: subprocess.Popen[bytes] | None = None
    passed = set[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        stand_still()  # if the signal is ending this process already
        passed.add(number)
        if child is not None:
            child.send_signal(number)

    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.set_wakeup_fd(-1)  # what came before this has ended this process
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, **quiet, CHILD: str(told)},
        pass_fds=(told,),
        preexec_fn=partial(_bind_to_parent, ctypes.CDLL(None).prctl, os.getpid()),
    )
    for number in list(passed):  # came before there was a child
        child.send_signal(number)
    code = child.wait()
    words = os.pread(told, os.fstat(told).st_size, 0).split(b"\0")
    if code < 0:
        for folder in (word for word in words if word.startswith(b"/")):
            remove_abandoned(Path(os.fsdecode(folder)))
    for last in (word for word in words if word[:1].isdigit()):
        told_code, _, line = last.decode().partition(" ")
        end(int(told_code), line)
    if code >= 0:
        end(code)
    error = _ended(-code, joined=len(words) > 1)
    end(error.exit_code, error_line(error, str, JSON_ERRORS in sys.argv))


def _bind_to_parent(prctl: Callable[[int, int], int], parent: int) -> None:
    """Lets the child end with its parent, and get signals once it handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WORDS)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def tell_parent(folders: Iterable[Path] = ()) -> None:
    """Reports to the parent, if there is one, that the processes have joined, and where this one writes."""
    if _TOLD.file is not None:
        os.write(_TOLD.file, b"\0".join([b"", *(os.fsencode(folder.absolute()) for folder in folders), b""]))


def tell_end(code: int, line: str) -> bool:
    """Reports how this process ends to the parent, which prints it; returns whether there is one."""
    if _TOLD.file is not None:
        os.write(_TOLD.file, b"\0".join([b"", f"{code} {line}".encode(), b""]))
    return _TOLD.file is not None


def _ended(number: int, joined: bool) -> ClusterError:
    """Returns the error of a child that a signal has ended; JAX uses SIGABRT."""
    if number != signal.SIGABRT:
        return ClusterError(
            "process_lost", "this process of the run was killed, or has crashed", found=f"signal {number}"
        )
    if not joined:
        return ClusterError(
            "process_lost",
            "not all processes of this run have started",
            remedy="start them at the same time, with the same --coordinator and --num-processes",
        )
    return lost_process()
