"""Runs a command to which file permissions apply: root ignores them, so its capability to do so is dropped.

python unprivileged.py COMMAND [ARGUMENT]...
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2

if __name__ == "__main__":
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "the capability cannot be dropped")
    os.execv(sys.argv[1], sys.argv[1:])
