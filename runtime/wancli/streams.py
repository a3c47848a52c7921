"""Standard output of a command: only lines of this program, or only a video."""

from __future__ import annotations

import os
import sys

from wanrun.errors import UsageError


def keep_stdout(quiet: bool) -> None:
    """Keeps what C++ libraries print out of standard output, and if ``quiet`` what this process prints too.

    Gloo, which carries collectives between the CPUs of several processes, prints a line per group of devices
    ("[Gloo] Rank 0 is connected to 1 peer ranks") to descriptor 1, and has no switch for it.
    """
    sys.stdout.flush()
    kept = os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(kept, "w", encoding=encoding, errors=errors, buffering=1)


def stdout_for_video() -> int:
    """Returns a descriptor of standard output; from now on, prints go to standard error.

    Raises UsageError if it is a terminal.
    """
    if sys.stdout.isatty():
        raise UsageError(
            "unsupported",
            "a terminal shows no video on standard output",
            remedy="choose another --output, or append | ffplay -",
        )
    sys.stdout.flush()
    video = os.dup(1)
    os.dup2(2, 1)
    return video
