"""Tries executables in another process, so that a crash or a hang does not reach this one.

The child writes its verdict to a file. If a signal or the time limit ends the child, the file says how far it
came.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from wanrun.errors import escaped
from wanrun.files import read_bounded
from wanrun.temporary import temporary_folder
from wanrun.trust.verdict import MAX_VERDICT_BYTES, Verdict, decoded_verdict

TRIAL_SECONDS = 3600.0
"""The most seconds of a trial: reading a large model from a slow disk, some steps, and compiling its VAE."""

CHILD = (sys.executable, "-P", "-m", "wanrun.attest")
"""The command that tries: see ``wanrun.attest.__main__``."""

MAX_SAID = 300
"""The most characters of a child's last words that a message repeats."""

FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
"""Signals that do not blame the executables: a user's, or the system's when memory has run out."""


def run_trial(
    arguments: Sequence[str], seconds: float = TRIAL_SECONDS, command: Sequence[str] | None = None
) -> Verdict:
    """Runs a child that tries executables, and returns its verdict.

    ``arguments`` are the child's, on its command line; ``command`` is run instead of ``CHILD``.
    """
    with temporary_folder(Path(tempfile.gettempdir())) as folder:
        outcome, said = folder / "outcome.json", folder / "said"
        with said.open("wb") as errors:
            # The child ends when its standard input does: this process has ended then, in whatever way.
            child = subprocess.Popen(
                [*(command or CHILD), *arguments, "--outcome", str(outcome)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        return _verdict(code, _told(outcome), _last_line(said), seconds)


def _told(outcome: Path) -> Verdict | None:
    """Returns the verdict that the child has written; None if none can be read."""
    try:
        return decoded_verdict(read_bounded(outcome, MAX_VERDICT_BYTES))
    except OSError:
        return None


def _last_line(said: Path) -> str:
    """Returns the child's last words on standard error, shortened."""
    lines = said.read_bytes()[-8 * MAX_SAID :].decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return escaped(last[-MAX_SAID:])


def _verdict(code: int | None, told: Verdict | None, said: str, seconds: float) -> Verdict:
    if code == 0 and told is not None:
        return told
    far = "before it had begun" if told is None else told.reason
    if code is None:
        reason, keep = f"the process that tried them had not ended after {seconds:g} s, {far}", True
    elif code < 0:
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        reason, keep = f"{name} ended the process that tried them, {far}", -code not in FROM_OUTSIDE
    else:
        reason, keep = f"the process that tried them ended with exit code {code}, {far}", True
    if said:
        reason += f"; it said: {said}"
    if told is None:  # no executable was looked at
        return Verdict(outcome="refused", reason=reason, keep=False)
    return msgspec.structs.replace(told, outcome="refused", reason=reason, keep=keep and told.keep)
