"""Brings weights to the device in the background, each component once, in the order of the requests.

| what | where it runs | waits for |
|---|---|---|
| chunk files of a component | a pool of reading threads, first in, first out | nothing |
| host copy of a component | a thread of its own | its chunk files |
| transfer of a component | a thread of its own | its host copy |

``request`` and ``prefetch`` return at once; ``weights`` waits for one component. Components that nobody
requests are never read.

| | host copy | device copy |
|---|---|---|
| ``prefetch`` | read, and stays until it is transferred | |
| ``request`` | reused or read; released after the transfer, unless it is kept | made |
| ``release`` | released, and its reads are cancelled, unless it is kept | released |

Memory is free once the last reference is gone: a future refers to its result, a bound program to its weights.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from wanrun.artifact.manifest import Component
from wanrun.artifact.mesh import cut
from wanrun.loading.buffers import Memory
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.restore import Restore, Tree, default_threads, nest
from wanrun.timing import now


class WeightStore:
    """The weights of an opened artifact on its device, shared by all of its profiles.

    Args:
        opened: the artifact.
        bits: whether bfloat16 weights are kept as uint16 of the same bits, as the programs take them.
        memories: memory that is already allocated, by component.
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
        self._restores: dict[str, Restore] = {}  # reads in progress
        self._hosts: dict[str, Future[Tree]] = {}
        self._weights: dict[str, Future[Any]] = {}
        self._orders: dict[str, object] = {}  # identifies the current transfer; ``release`` revokes it
        self._readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="restore")
        # A transfer is queued after its host copy, which waits only for readers, so there is no deadlock.
        # With two threads per component none even waits for a thread.
        threads = max(1, 2 * len(self.components))
        self._transfers = ThreadPoolExecutor(threads, thread_name_prefix="transfer")

    @property
    def components(self) -> Mapping[str, Component]:
        """The artifact's components, by name."""
        return self._opened.manifest.components

    def keep_on_host(self, components: Iterable[str]) -> None:
        """Adds components whose host copies are kept from now on.

        A kept component returns to the device without being read again. CPU device arrays are that copy.
        """
        with self._lock:
            self._kept |= frozenset(components)

    def request(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts to bring components to the device, in this order; returns one future per component."""
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
        """Starts to read components into host memory for a later ``request``.

        Returns:
            One future per component: of its device copy if requested before, else of its host copy.
        """
        with self._lock:
            return [self._weights[name] if name in self._weights else self._host(name) for name in components]

    def _host(self, name: str) -> Future[Tree]:
        """Returns the future of a component's host copy, read if there is none; the caller holds the lock."""
        if name not in self._hosts:
            _free_dropped()  # before allocating as much again
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
            del host  # its exception refers to this frame, and would keep the memory until a full collection
            raise
        with self._lock:
            if self._orders.get(name) is not order:  # released meanwhile: the device may have no room now
                raise CancelledError
        with self._opened.recorder.phase("transfer", name):
            weights = jax.block_until_ready(self._put_weights(name, tree))
        with self._lock:  # a device with its own memory needs no host copy any more
            if name not in self._kept and self._hosts.get(name) is host:
                del self._hosts[name]
        return weights

    def weights(self, name: str) -> Mapping[str, Any]:
        """Waits for a component's weights on the device; returns nested dicts by path.

        Raises:
            ArtifactError: if they are damaged.
        """
        (future,) = self.request([name])
        return future.result()

    def put(self, tree: Any) -> Any:
        """Puts host arrays on the device, or on all of a mesh, for inputs that many program calls share."""
        import jax

        return jax.device_put(tree, self._opened.device.whole)

    def _put_weights(self, name: str, tree: Tree) -> Any:
        """Puts a component's host arrays on the device, or their parts on the devices of a mesh."""
        import jax

        if (mesh := self._opened.device.mesh) is None:
            return self.put(tree)
        rules = self._opened.program_set.rules
        shardings = {
            path: jax.sharding.NamedSharding(
                mesh,
                jax.sharding.PartitionSpec(
                    *(
                        along or None
                        for along in cut(parameter.axes, parameter.layout.shape, rules, mesh.shape)
                    )
                ),
            )
            for path, parameter in self.components[name].parameters.items()
        }
        return jax.device_put(tree, nest(shardings))

    def release(self, component: str) -> None:
        """Releases a component; it can be requested again. Its memory is free without other references.

        Callers that still wait for it get a CancelledError. A kept host copy stays, and its reads continue.
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
        """Cancels what has not started and releases everything."""
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
    """Frees host memory that CPU device arrays aliased: jaxlib defers that to its next call or to a garbage
    collection, and collecting the youngest generation suffices."""
    gc.collect(0)
