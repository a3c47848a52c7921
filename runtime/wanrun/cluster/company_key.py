"""The secret that the processes of a run share: who does not prove it is not heard at process 0's port."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from wanrun.errors import UsageError, quoted
from wanrun.files import read_bounded

VARIABLE = "WANRUN_COMPANY_KEY"
"""The environment variable that has the secret; with ``_FILE`` behind it, the one that names its file."""

MAX_KEY_BYTES = 4096


def company_key() -> str:
    """Returns the secret of the environment, or of the file that it names; empty without one.

    Raises:
        UsageError: if the file cannot be read, or has no text.
    """
    if (name := os.environ.get(f"{VARIABLE}_FILE")) is None:
        return os.environ.get(VARIABLE, "")
    try:
        if key := read_bounded(Path(name), MAX_KEY_BYTES).decode().strip():
            return key
        problem: object = "nothing"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
    raise UsageError(
        f"{VARIABLE}_FILE cannot be used",
        expected=f"a file with the secret of the run, at most {MAX_KEY_BYTES} bytes",
        found=f"{quoted(name)}: {problem}",
    )


def proof_of(key: str) -> bytes:
    """Returns the 64 bytes that a process sends first, so that the secret itself is not on the network."""
    return hashlib.sha256(b"a process of this wanrun\0" + os.fsencode(key)).hexdigest().encode()
