"""Standard output of a command in a run of several processes: lines of this program alone."""

from __future__ import annotations

import os
import sys


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
