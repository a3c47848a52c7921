"""The parent of a command in a run of several processes, which is left when JAX has ended the command.

JAX's service ends the process from C++ when another one is gone. So the command starts itself again as a
child. The parent, which has no JAX, passes signals on. If the child was ended without an exit code, it says
so, and removes what the child has left.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from wanrun.errors import ClusterError
from wanrun.terminal.temporary import remove_abandoned
from wanrun.terminal.undo import end

OPTIONS = ("--distributed", "--coordinator", "--num-processes", "--process-id")
"""The options of a run of several processes."""

CHILD = "WANRUN_CHILD"
"""The child's environment variable, with the number of the file in which it tells the parent something."""

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "4"}
"""Keeps the stack trace away that C++ prints."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


def run_with_parent() -> None:
    """Makes this process the parent of its command, if that is of several processes, until both end.

    It returns in the child, and in a command of one process.
    """
    named = {argument.partition("=")[0] for argument in sys.argv}
    if CHILD not in os.environ and not named.isdisjoint(OPTIONS):
        _run_as_child()


def _run_as_child() -> NoReturn:
    """Runs this command again as a child, and ends this process as that has ended."""
    import ctypes
    import subprocess

    told = os.memfd_create("told")
    quiet = {} if "--debug" in sys.argv else _QUIET
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, **quiet, CHILD: str(told)},
        pass_fds=(told,),
        preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    code = child.wait()
    if code >= 0:
        end(code)
    words = os.pread(told, os.fstat(told).st_size, 0).split(b"\0")
    for folder in filter(None, words):
        remove_abandoned(Path(os.fsdecode(folder)))
    error = _ended(-code, joined=len(words) > 1)
    end(error.exit_code, f"error: {error}")


def tell_parent(folders: Iterable[Path] = ()) -> None:
    """Tells the parent, if there is one, that the processes have joined, and where this one writes."""
    if (told := os.environ.get(CHILD)) is not None:
        os.write(int(told), b"\0".join([b"", *(os.fsencode(folder.absolute()) for folder in folders), b""]))


def _ended(number: int, joined: bool) -> ClusterError:
    """Returns the error of a child that a signal has ended; JAX ends it by SIGABRT."""
    if number != signal.SIGABRT:
        return ClusterError("this process of the run was killed, or has crashed", found=f"signal {number}")
    if not joined:
        return ClusterError(
            "not all processes of this run have started",
            remedy="start them at the same time, with the same --coordinator and --num-processes",
        )
    return lost()


def lost(found: str | None = None) -> ClusterError:
    """Returns the error of a process that has lost another one."""
    return ClusterError(
        "another process of this run has ended, or cannot be reached",
        found=found,
        remedy="see what the others say; --debug shows what JAX says",
    )
