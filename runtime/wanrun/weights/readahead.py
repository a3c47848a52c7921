"""What is done for a component before the device is open: its memory is touched, and its files are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wanrun.artifact.manifest import Component
from wanrun.opened.policy import LoadPolicy
from wanrun.weights.buffers import Memory
from wanrun.weights.restore import Restore, default_threads

SLOW = frozenset({"cuda", "tpu"})
"""Platforms whose devices take seconds to start, outside of Python and on other memory. A CPU's start at
once, and its cores have enough to do: reading during the import of JAX gained nothing
(docs/notes/runtime.md, "Start")."""


class ReadAhead:
    """Components of an artifact that a start begins with; each is handed over once."""

    def __init__(self, folder: Path, policy: LoadPolicy) -> None:
        self._folder, self._policy = folder, policy
        self._components: dict[str, Component] = {}
        self._memories: dict[str, Memory] = {}
        self._restores: dict[str, Restore] = {}

    def touch(self, name: str, component: Component) -> None:
        """Allocates a component's memory, and touches it in a thread."""
        self._components[name], self._memories[name] = component, Memory(component)
        self._memories[name].touch_ahead()

    def read(self, platform: str) -> None:
        """Begins to read the components that are touched, if a platform's devices take long to start.

        Raises UsageError if the policy's weights are not a folder.
        """
        if platform not in SLOW:
            return
        readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="ahead")
        for name, component in self._components.items():
            how = self._policy.verify, self._policy.weights, self._memories.pop(name)
            self._restores[name] = Restore(self._folder, name, component, readers, *how)
        readers.shutdown(wait=False)

    def memory(self, name: str) -> Memory | None:
        """Hands over the memory of a component that is not read; None if there is none."""
        return self._memories.pop(name, None)

    def restore(self, name: str) -> Restore | None:
        """Hands over the reading of a component; None if it has not begun."""
        return self._restores.pop(name, None)

    def stop(self) -> None:
        """Ends what nobody has taken, and lets go of it."""
        for memory in self._memories.values():
            memory.stop()
        for restore in self._restores.values():
            restore.cancel()
        self._memories.clear()
        self._restores.clear()
