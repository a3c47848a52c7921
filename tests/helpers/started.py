"""The processes that a test starts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable


class Started(list[subprocess.Popen[bytes]]):
    """Processes, in the order of their start.

    Attributes:
        then: called with each of them as soon as it runs.
    """

    then: Callable[[subprocess.Popen[bytes]], object] = id
