"""Starts a worker's process, and says how it ended. It is imported before all that takes time to import."""

from __future__ import annotations

__all__ = ["WorkerProcess", "begin_line"]

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from wanrun import Artifact

_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Begin(Struct, tag=True):
    """To a worker, once: what it has, and how it is loaded.

    ``artifacts`` has, by model, each artifact's folder, the address that it comes from or "", and its content
    digest; the first is loaded now. ``loading`` are keywords of ``wanrun.load``, ``max_pixels`` those of an
    image.
    """

    artifacts: dict[str, tuple[str, str, str]]
    loading: dict[str, Any]
    max_pixels: int


def begin_line(artifacts: Mapping[str, Artifact], loading: Mapping[str, Any], max_pixels: int) -> bytes:
    """Returns the first line for a worker: the artifact of each model, and the others as of ``Begin``."""
    places = {
        name: (str(one.folder), one.origin, one.manifest.content_digest) for name, one in artifacts.items()
    }
    return msgspec.json.encode(Begin(places, dict(loading), max_pixels)) + b"\n"


class WorkerProcess:
    """A started worker.

    Attributes:
        socket: the server's end of the socket pair.
    """

    def __init__(self, environment: Mapping[str, str], begin: bytes) -> None:
        """Starts the process.

        Args:
            environment: variables that it has in addition to the server's.
            begin: the first line for it.

        Raises:
            OSError: if the system gives no more processes.
        """
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "wanserve.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C only reaches the server, which ends its jobs in order
            )
        self.socket.sendall(begin)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait(self) -> int:
        """Waits for the end, and returns the exit code, negative for a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once; its socket is closed, which ends it too."""
        self._process.kill()


def from_outside(code: int) -> bool:
    """Whether a process was ended from outside, for want of memory too; other signals are its own crash."""
    return -code in _FROM_OUTSIDE


def how(code: int) -> str:
    """Returns an exit code in words."""
    if code < 0:
        name = signal.strsignal(-code) or "unknown"
        perhaps = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"signal {-code} ({name}{perhaps})"
    return f"exit code {code}"
