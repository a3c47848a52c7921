"""The address space that JAX needs, where a process has a limit (``ulimit -v``, ``-d``)."""

from __future__ import annotations

import resource
from pathlib import Path

from wanrun.errors import WanError

JAX_BYTES, BYTES_A_CORE, MOST_CORES = 2**30, 2**28, 8
"""On two cores, importing JAX, its CPU client of 12 threads and a small program take 1.3 GB (jax 0.10.2).
The need of more than ``MOST_CORES`` was not measured, so a limit that may suffice there is not refused."""


def check_address_space(cores: int) -> None:
    """Raises WanError if the limit leaves less than JAX needs on this number of cores, before it is imported.

    JAX's C++ ends the process when a thread cannot start: limits of 500 to 1200 MB gave SIGABRT, SIGSEGV or
    exit code 127.
    """
    limit = min(resource.getrlimit(kind)[0] % 2**64 for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    needed, left = JAX_BYTES + BYTES_A_CORE * min(cores, MOST_CORES), limit - _taken()
    if left < needed:
        raise WanError(
            "the limit of this process's memory (ulimit -v or -d) leaves too little for JAX",
            expected=f"{needed / 1e9:.1f} GB or more, besides the weights",
            found=f"{max(0, left) / 1e9:.1f} GB",
            remedy="raise the limit, or limit the resident memory instead, as a container does",
        )


def _taken() -> int:
    """The address space that this process has mapped, in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 0
