"""Brings programs and weights to the device in the background, each once, in the order of being asked for.

| what | where it runs | waits for |
|---|---|---|
| chunk files of a component | a pool of reading threads, first in, first out | nothing |
| transfer of a component | a thread of its own | its chunk files |
| executables | one thread: JAX's cache belongs to the process | nothing |

``request`` returns at once; ``weights`` and ``bound`` wait for what they need and no more. What nobody asks
for is never read.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.device import OpenDevice
from wanrun.executables import Executables, LoadedProgram, overlay_folder
from wanrun.manifest import Manifest, Profile, Program
from wanrun.memory import Memory
from wanrun.restore import Restore, default_threads
from wanrun.select import SelectedTarget
from wanrun.timing import Timings


class Loader:
    """Programs and weights of one profile, on their way to a device or there.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        profile: the chosen profile.
        selected: the chosen target.
        device: where programs run.
        weights: where the components lie, if not in the artifact: a folder or a URL.
        memories: memory for components that was made ahead.
        allow_compile: compile from the StableHLO where no executable fits.
        verify: 'fast' or 'sha256'.
        timings: where spans and cache counts are recorded.
        warn: told when something had to be compiled.

    Raises:
        ArtifactError: if a program or an executable is missing or damaged; all are checked at once.
    """

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        profile: Profile,
        selected: SelectedTarget,
        device: OpenDevice,
        *,
        weights: str | None = None,
        memories: Mapping[str, Memory] = MappingProxyType({}),
        allow_compile: bool = False,
        verify: str = "fast",
        timings: Timings,
        warn: Callable[[str], None],
    ) -> None:
        self._artifact, self._manifest, self._location = artifact, manifest, weights
        self._device, self._verify, self._timings = device.device, verify, timings
        target = selected.target
        self.programs: Mapping[str, Program] = profile.programs[target.environment["platform"]]
        self._bits = any(program.weight_bits for program in self.programs.values())
        if device.foreign:
            target = dataclasses.replace(target, executables={})
        overlay = functools.partial(overlay_folder, manifest, selected.name) if allow_compile else None
        self._executables = Executables(artifact, target, profile, self._device, overlay, warn)
        self._memories = dict(memories)
        self._lock = threading.Lock()
        self._restores: dict[str, Restore] = {}
        self._weights: dict[str, Future[Any]] = {}
        self._programs: dict[str, Future[LoadedProgram]] = {}
        self._readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="restore")
        self._transfers = ThreadPoolExecutor(max(1, len(manifest.components)), thread_name_prefix="transfer")
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="executables")

    def request(self, *, programs: Iterable[str] = (), components: Iterable[str] = ()) -> list[Future[Any]]:
        """Starts loading what is not loaded yet, in this order, and returns everything's futures."""
        futures: list[Future[Any]] = []
        with self._lock:
            for name in components:
                if name not in self._weights:
                    self._weights[name] = self._read(name)
                futures.append(self._weights[name])
            for name in programs:
                if name not in self._programs:
                    self._programs[name] = self._compilers.submit(self._load_program, name)
                futures.append(self._programs[name])
        return futures

    def _read(self, name: str) -> Future[Any]:
        restore = Restore(
            self._artifact,
            name,
            self._manifest.components[name],
            self._readers,
            self._verify,
            clock=self._timings.now,
            weights=self._location,
            memory=self._memories.pop(name, None),
        )
        self._restores[name] = restore
        return self._transfers.submit(self._transfer, restore)

    def _transfer(self, restore: Restore) -> Any:
        import jax

        tree = restore.result(self._bits)
        self._timings.add("restore", restore.started_at, restore.finished_at, restore.name)
        with self._timings.phase("transfer", restore.name):
            weights = jax.block_until_ready(jax.device_put(tree, self._device))
        with self._lock:  # so that a device with memory of its own does not cost the host's too
            self._restores.pop(restore.name, None)
        return weights

    def _load_program(self, name: str) -> LoadedProgram:
        hits, misses = self._executables.hits, self._executables.misses
        try:
            with self._timings.phase("executables", name):
                return self._executables.load(name)
        finally:
            self._timings.cache_hits += self._executables.hits - hits
            self._timings.cache_misses += self._executables.misses - misses

    def weights(self, name: str) -> Mapping[str, Any]:
        """A component's weights on the device, as nested dicts by path; waits for them.

        Raises:
            ArtifactError: if they are damaged.
        """
        (future,) = self.request(components=[name])
        return future.result()

    def bound(self, name: str) -> Callable[..., Mapping[str, Any]]:
        """A program with its weights, which takes its other inputs by name; waits for both.

        Raises:
            ArtifactError: if the program or the weights cannot be loaded.
        """
        components = [name for name in self.programs[name].inputs if name in self._manifest.components]
        futures = self.request(programs=[name], components=components)
        *trees, program = (future.result() for future in futures)
        return functools.partial(program, **dict(zip(components, trees, strict=True)))

    def raise_failures(self) -> None:
        """Raises what has failed in the background so far, so that nobody computes for nothing."""
        with self._lock:
            futures = [*self._weights.values(), *self._programs.values()]
        for future in futures:
            if future.done() and not future.cancelled():
                future.result()

    def release(self, component: str) -> None:
        """Lets go of a component, which frees its memory; it can be asked for again."""
        with self._lock:
            self._weights.pop(component, None)

    def close(self) -> None:
        """Drops what has not started and lets go of everything."""
        with self._lock:
            for restore in self._restores.values():
                restore.cancel()
            for pool in (self._readers, self._transfers, self._compilers):
                pool.shutdown(wait=False, cancel_futures=True)
            self._restores.clear()
            self._weights.clear()
            self._programs.clear()
