"""Loads an executable once in a process of tests: XLA takes twice as long for it as all else of a load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from unittest import mock

KEPT = 64
"""Executables that are kept: those of the artifacts that a file of tests takes turns with."""


@contextmanager
def loaded_once() -> Iterator[None]:
    """Gives the executable that XLA has made of the same bytes, devices and options before.

    What hands them to XLA runs as ever, and so does XLA in each command that has a process of its own.
    """
    from jaxlib._jax import Client

    own, kept, lock = Client.deserialize_executable, dict[Any, Any](), threading.Lock()

    def deserialize(client: Any, data: bytes, devices: Any, options: Any) -> Any:
        key = client, sha256(data).digest(), devices, options.SerializeAsString()
        with lock:
            executable = kept.pop(key, None)
        executable = executable or own(client, data, devices, options)
        with lock:
            kept[key] = executable
            while len(kept) > KEPT:
                del kept[next(iter(kept))]
        return executable

    with mock.patch.object(Client, "deserialize_executable", deserialize):
        yield
