"""Brings weights to the device in the background, each component once, in the order of being asked for.

| what | where it runs | waits for |
|---|---|---|
| chunk files of a component | a pool of reading threads, first in, first out | nothing |
| host copy of a component | a thread of its own | its chunk files |
| transfer of a component | a thread of its own | its host copy |

``request`` and ``prefetch`` return at once; ``weights`` waits for what it needs and no more. What nobody asks
for is never read.

| | host copy | device copy |
|---|---|---|
| ``prefetch`` | read, and stays until it is transferred | |
| ``request`` | the one that is there, or read; let go of when transferred unless it is to be kept | made |
| ``release`` | let go of, and its reads are dropped, unless it is to be kept | let go of |

Memory is free again when nobody else holds it: a future holds what it brought, a bound program its weights.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from wanrun.artifact.manifest import Component
from wanrun.loading.buffers import Memory
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.restore import Restore, Tree, default_threads
from wanrun.timing import now


class WeightStore:
    """The weights of an opened artifact, on their way to its device or there; all of its profiles share them.

    Args:
        opened: the artifact.
        bits: whether bfloat16 weights are kept as uint16 of the same bits, as its programs take them.
        memories: memory for components that was made ahead.
    """

    def __init__(
        self,
        opened: OpenedArtifact,
        bits: bool,
        memories: Mapping[str, Memory] = MappingProxyType({}),
    ) -> None:
        self._opened, self.bits = opened, bits
        self._memories = dict(memories)
        self._kept: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._restores: dict[str, Restore] = {}  # that are being read
        self._hosts: dict[str, Future[Tree]] = {}
        self._weights: dict[str, Future[Any]] = {}
        self._orders: dict[str, object] = {}  # what a transfer was asked for with; ``release`` takes it back
        self._readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="restore")
        # A transfer is queued after the host copy it waits for, which waits for readers alone: none can block
        # another for good. With two threads a component none even waits for its turn.
        threads = max(1, 2 * len(self.components))
        self._transfers = ThreadPoolExecutor(threads, thread_name_prefix="transfer")

    @property
    def components(self) -> Mapping[str, Component]:
        """The components that there are, by name."""
        return self._opened.manifest.components

    def keep_on_host(self, components: Iterable[str]) -> None:
        """Keeps the host copies of these components too from now on.

        So a released one comes back without being read again. On the CPU the device's arrays are that copy.
        """
        with self._lock:
            self._kept |= frozenset(components)

    def request(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts to bring components that are not there yet, in this order; returns a future each."""
        futures: list[Future[Any]] = []
        with self._lock:
            for name in components:
                if name not in self._weights:
                    host, order = self._host(name), object()
                    self._orders[name] = order
                    self._weights[name] = self._transfers.submit(self._transfer, name, host, order)
                futures.append(self._weights[name])
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
                self._opened.folder,
                name,
                self.components[name],
                self._readers,
                self._opened.policy.verify,
                clock=now,
                weights=self._opened.policy.weights,
                memory=self._memories.pop(name, None),
            )
            self._restores[name] = restore
            self._hosts[name] = self._transfers.submit(self._read, restore)
        return self._hosts[name]

    def _read(self, restore: Restore) -> Tree:
        try:
            tree = restore.result(self.bits)
        finally:
            with self._lock:
                if self._restores.get(restore.name) is restore:
                    del self._restores[restore.name]
        self._opened.recorder.add("restore", restore.started_at, restore.finished_at, restore.name)
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
        with self._opened.recorder.phase("transfer", name):
            weights = jax.block_until_ready(self.put(tree))
        with self._lock:  # so that a device with memory of its own does not cost the host's too
            if name not in self._kept and self._hosts.get(name) is host:
                del self._hosts[name]
        return weights

    def weights(self, name: str) -> Mapping[str, Any]:
        """A component's weights on the device, as nested dicts by path; waits for them.

        Raises:
            ArtifactError: if they are damaged.
        """
        (future,) = self.request([name])
        return future.result()

    def put(self, tree: Any) -> Any:
        """Arrays of the host, on the device: for what many calls of a program take."""
        import jax

        return jax.device_put(tree, self._opened.device.device)

    def release(self, component: str) -> None:
        """Lets go of a component; it can be asked for again. Its memory is free once nobody else holds it.

        Who still waits for it gets a CancelledError. The host copy of a component that is to be kept stays,
        or goes on being read.
        """
        with self._lock:
            self._orders.pop(component, None)
            self._weights.pop(component, None)
            if component not in self._kept:
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
            for pool in (self._readers, self._transfers):
                pool.shutdown(wait=False, cancel_futures=True)
            self._restores.clear()
            self._memories.clear()
            self._hosts.clear()
            self._weights.clear()
            self._orders.clear()
        _free_dropped()


def _free_dropped() -> None:
    """Frees host memory that arrays on the CPU device aliased: jaxlib puts that off to its next call, or to a
    garbage collection, of which the smallest will do."""
    gc.collect(0)
