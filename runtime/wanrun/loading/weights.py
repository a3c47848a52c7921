"""Brings programs and weights to the device in the background, each once, in the order of being asked for.

| what | where it runs | waits for |
|---|---|---|
| chunk files of a component | a pool of reading threads, first in, first out | nothing |
| host copy of a component | a thread of its own | its chunk files |
| transfer of a component | a thread of its own | its host copy |
| executables | one thread: JAX's cache belongs to the process | nothing |

``request`` and ``prefetch`` return at once; ``weights`` and ``bound`` wait for what they need and no more.
What nobody asks for is never read.

| | host copy | device copy |
|---|---|---|
| ``prefetch`` | read, and stays until it is transferred | |
| ``request`` | the one that is there, or read; let go of when transferred unless it is to be kept | made |
| ``release`` | let go of, and its reads are dropped, unless it is to be kept | let go of |

Memory is free again when nobody else holds it: a future holds what it brought, a bound program its weights.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from wanrun.artifact.manifest import Manifest, Profile
from wanrun.artifact.programs import Program
from wanrun.artifact.select import SelectedTarget
from wanrun.loading.buffers import Memory
from wanrun.loading.device import OpenDevice
from wanrun.loading.executables import Executables, LoadedProgram, overlay_folder
from wanrun.loading.restore import Restore, Tree, default_threads
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
        keep_on_host: components whose host copies are kept, so that a released one comes back without being
            read again. On the CPU the device's arrays are that copy.
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
        keep_on_host: frozenset[str] = frozenset(),
        allow_compile: bool = False,
        verify: str = "fast",
        timings: Timings,
        warn: Callable[[str], None],
    ) -> None:
        self._artifact, self._manifest, self._location = artifact, manifest, weights
        self._device, self._verify, self._timings = device.device, verify, timings
        target = selected.target
        self.programs: Mapping[str, Program] = manifest.programs(target, profile)
        self._bits = manifest.program_sets[target.program_set].kernels.weight_bits
        if device.foreign:
            target = msgspec.structs.replace(target, executables={})
        overlay = functools.partial(overlay_folder, manifest, selected.name) if allow_compile else None
        self._executables = Executables(artifact, target, profile, self.programs, self._device, overlay, warn)
        self._memories, self._keep_on_host = dict(memories), keep_on_host
        self._lock = threading.Lock()
        self._restores: dict[str, Restore] = {}  # that are being read
        self._hosts: dict[str, Future[Tree]] = {}
        self._weights: dict[str, Future[Any]] = {}
        self._orders: dict[str, object] = {}  # what a transfer was asked for with; ``release`` takes it back
        self._programs: dict[str, Future[LoadedProgram]] = {}
        self._readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="restore")
        # A transfer is queued after the host copy it waits for, which waits for readers alone: none can block
        # another for good. With two threads a component none even waits for its turn.
        threads = max(1, 2 * len(manifest.components))
        self._transfers = ThreadPoolExecutor(threads, thread_name_prefix="transfer")
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="executables")

    def request(self, *, programs: Iterable[str] = (), components: Iterable[str] = ()) -> list[Future[Any]]:
        """Starts loading what is not loaded yet, in this order, and returns everything's futures."""
        futures: list[Future[Any]] = []
        with self._lock:
            for name in components:
                if name not in self._weights:
                    host, order = self._host(name), object()
                    self._orders[name] = order
                    self._weights[name] = self._transfers.submit(self._transfer, name, host, order)
                futures.append(self._weights[name])
            for name in programs:
                if name not in self._programs:
                    self._programs[name] = self._compilers.submit(self._load_program, name)
                futures.append(self._programs[name])
        return futures

    def prefetch(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts reading components into host memory, from where a later ``request`` takes them.

        Returns:
            A future each; of the device's copy where there is one or one is on its way.
        """
        with self._lock:
            return [self._weights[name] if name in self._weights else self._host(name) for name in components]

    def _host(self, name: str) -> Future[Tree]:
        """The host copy of a component, which is read if there is none; the lock is held."""
        if name not in self._hosts:
            _free_dropped()  # before as much is taken again
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
            self._hosts[name] = self._transfers.submit(self._read, restore)
        return self._hosts[name]

    def _read(self, restore: Restore) -> Tree:
        try:
            tree = restore.result(self._bits)
        finally:
            with self._lock:
                if self._restores.get(restore.name) is restore:
                    del self._restores[restore.name]
        self._timings.add("restore", restore.started_at, restore.finished_at, restore.name)
        return tree

    def _transfer(self, name: str, host: Future[Tree], order: object) -> Any:
        import jax

        try:
            tree = host.result()
        except BaseException:
            del host  # its error refers to this frame, and would keep the memory until a full collection
            raise
        with self._lock:
            if self._orders.get(name) is not order:  # released meanwhile: there may be no room for it now
                raise CancelledError
        with self._timings.phase("transfer", name):
            weights = jax.block_until_ready(jax.device_put(tree, self._device))
        with self._lock:  # so that a device with memory of its own does not cost the host's too
            if name not in self._keep_on_host and self._hosts.get(name) is host:
                del self._hosts[name]
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

    def bound(self, name: str, **components: str) -> Callable[..., Mapping[str, Any]]:
        """A program with its weights, which takes its other inputs by name; waits for both.

        Args:
            name: the program.
            components: the component to bind to an input, by the input's name, where it is not the component
                of that name: ``transformer="transformer_2"``. The executable is the same.

        Raises:
            ArtifactError: if the program or the weights cannot be loaded.
            ValueError: if the program takes no such weights.
        """
        inputs = [name for name in self.programs[name].inputs if name in self._manifest.components]
        if unknown := components.keys() - set(inputs):
            raise ValueError(f"{name} takes no weights {sorted(unknown)}")
        futures = self.request(programs=[name], components=[components.get(key, key) for key in inputs])
        *trees, program = (future.result() for future in futures)
        return functools.partial(program, **dict(zip(inputs, trees, strict=True)))

    def put(self, tree: Any) -> Any:
        """Arrays of the host, on the device: for what many calls of a program take."""
        import jax

        return jax.device_put(tree, self._device)

    def raise_failures(self) -> None:
        """Raises what has failed in the background so far, so that nobody computes for nothing."""
        with self._lock:
            futures = [*self._hosts.values(), *self._weights.values(), *self._programs.values()]
        for future in futures:
            if not future.done() or future.cancelled() or isinstance(future.exception(), CancelledError):
                continue
            future.result()

    def release(self, component: str) -> None:
        """Lets go of a component; it can be asked for again. Its memory is free once nobody else holds it.

        Who still waits for it gets a CancelledError. The host copy of a component that is to be kept stays,
        or goes on being read.
        """
        with self._lock:
            self._orders.pop(component, None)
            self._weights.pop(component, None)
            if component not in self._keep_on_host:
                self._hosts.pop(component, None)
                if component in self._restores:
                    self._restores.pop(component).cancel()
        _free_dropped()

    def close(self) -> None:
        """Drops what has not started and lets go of everything."""
        with self._lock:
            for restore in self._restores.values():
                restore.cancel()
            for memory in self._memories.values():
                memory.stop()
            for pool in (self._readers, self._transfers, self._compilers):
                pool.shutdown(wait=False, cancel_futures=True)
            self._restores.clear()
            self._memories.clear()
            self._hosts.clear()
            self._weights.clear()
            self._orders.clear()
            self._programs.clear()
        _free_dropped()


def _free_dropped() -> None:
    """Frees host memory that arrays on the CPU device aliased: jaxlib puts that off to its next call, or to a
    garbage collection, of which the smallest will do."""
    gc.collect(0)


def when_done(futures: Sequence[Future[Any]], done: Callable[[], None]) -> None:
    """Calls done in the moment when all have succeeded, if they do."""
    lock, left = threading.Lock(), len(futures)

    def count(future: Future[Any]) -> None:
        nonlocal left
        if future.cancelled() or future.exception() is not None:
            return
        with lock:
            left -= 1
            last = left == 0
        if last:
            done()

    for future in futures:
        future.add_done_callback(count)


def unfinished(futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    """The futures that are not done; raises the first failure of those that are."""
    pending = []
    for future in futures:
        if future.done():
            future.result()
        else:
            pending.append(future)
    return pending
