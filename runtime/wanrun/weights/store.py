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

import functools
import gc
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Tree, flat, nest
from wanrun.artifact.programs import Profile, ProfileOptions
from wanrun.artifact.staged import spread_name
from wanrun.executables.executables import Executables
from wanrun.machine.jax_process import own_options
from wanrun.machine.memory import Machine
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.timing.spans import Span
from wanrun.weights.layers import LayerStream
from wanrun.weights.loras import KEPT_SHARE, AppliedLora, FilledSlots, KeptLoras
from wanrun.weights.readahead import ReadAhead
from wanrun.weights.restore import Restore, default_threads
from wanrun.weights.slots import Slots
from wanrun.weights.transfer import Staged, Transfer

if TYPE_CHECKING:
    import jax


class WeightStore:
    """The weights of an opened artifact on its device, shared by all of its profiles, and its executables.

    ``ahead`` is what was begun before the device was open; only for one device. Some ``executables`` spread
    weights over a mesh.
    """

    def __init__(self, opened: OpenedArtifact, ahead: ReadAhead | None = None) -> None:
        self.opened, self.executables = opened, Executables(opened)
        # Whether floats of ``BITS`` are kept as integers of the same bits, as the programs take them.
        self._bits = opened.program_set.kernels.weight_bits
        self._ahead = ahead or ReadAhead(opened.artifact.folder, opened.policy)
        self._kept: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._mesh_transfers: dict[str, Transfer] = {}  # on a mesh
        self._restores: dict[str, Restore] = {}  # reads in progress
        self._hosts: dict[str, Future[Tree]] = {}
        self._weights: dict[str, Future[Any]] = {}
        self._streams: dict[str, LayerStream] = {}
        self._slots: dict[tuple[int, str], Slots] = {}
        self._kept_loras: KeptLoras | None = None
        self._orders: dict[str, object] = {}  # identifies the current transfer; ``release`` revokes it
        self._readers = ThreadPoolExecutor(default_threads(), thread_name_prefix="restore")
        # A transfer is queued after its host copy, which waits only for readers, so there is no deadlock.
        # With two threads per component none even waits for a thread.
        threads = max(1, 2 * len(self.components))
        self._transfers = ThreadPoolExecutor(threads, thread_name_prefix="transfer")

    @property
    def components(self) -> Mapping[str, Component]:
        """The artifact's components, by name."""
        return self.opened.manifest.components

    def keep_on_host(self, components: Iterable[str]) -> None:
        """Adds components whose host copies are kept from now on.

        A kept component returns to the device without being read again. CPU device arrays are that copy.
        """
        with self._lock:
            self._kept |= frozenset(components)

    def request(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts to bring components to the device, in this order; returns a future for each.

        ``weights`` gives what it has brought.
        """
        futures: list[Future[Any]] = []
        with self._lock:
            for name in components:
                if name not in self._weights:
                    self._request_spread(name)
                    host, order = self._host(name), object()
                    self._orders[name] = order
                    self._weights[name] = self._transfers.submit(self._transfer, name, host, order)
                futures.append(self._weights[name])
        return futures

    def prefetch(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts to read components into host memory for a later ``request``; returns a future for each.

        It is that of the device copy if requested before, else of the host copy.
        """
        with self._lock:
            return [self._weights[name] if name in self._weights else self._host(name) for name in components]

    def _host(self, name: str) -> Future[Tree]:
        """Returns the future of a component's host copy, read if there is none; the caller holds the lock."""
        if name not in self._hosts:
            _free_dropped()  # before allocating as much again
            transfer = self.mesh_transfer(name)
            restore = self._ahead.restore(name) or Restore(
                self.opened.artifact.folder,
                name,
                self.components[name],
                self._readers,
                self.opened.policy.verify,
                weights=self.opened.policy.weights,
                memory=self._ahead.memory(name),
                rows={} if transfer is None else transfer.rows,
            )
            self._restores[name] = restore
            recorder = self.opened.recorder
            reading = recorder.begin("restore", name, lambda: restore.progress)
            self._hosts[name] = self._transfers.submit(self._read, restore, reading)
            self._hosts[name].add_done_callback(lambda _: recorder.end(reading, restore.ended_at))
        return self._hosts[name]

    def _read(self, restore: Restore, reading: Span) -> Tree:
        try:
            tree = restore.result(self._bits)
        finally:
            with self._lock:
                if self._restores.get(restore.name) is restore:
                    del self._restores[restore.name]
        reading.start = restore.started_at  # before it, other components were read
        reading.nbytes, reading.rate = restore.nbytes, restore.rate
        self.opened.recorder.count(restore_bytes=restore.nbytes)
        return tree

    def _transfer(self, name: str, host: Future[Tree], order: object) -> Any:
        try:
            tree = host.result()
        except BaseException:
            del host  # its exception refers to this frame, and would keep the memory until a full collection
            raise
        with self._lock:
            if self._orders.get(name) is not order:  # released meanwhile: the device may have no room now
                raise CancelledError
        with self.opened.recorder.phase("transfer", name) as moving, own_options():
            moving.nbytes = sum(array.nbytes for array in flat(tree).values())
            weights = self._put_weights(name, tree)
        with self._lock:  # a device with its own memory needs no host copy any more
            if name not in self._kept and self._hosts.get(name) is host:
                del self._hosts[name]
        return weights

    def weights(self, name: str) -> Mapping[str, Any]:
        """Waits for a component's weights on the device; returns nested dicts by path.

        The first call after a staged transfer runs the program that spreads them. Raises ArtifactError if
        they are damaged.
        """
        (future,) = self.request([name])
        brought = self.opened.waits.result(future)
        return brought.weights() if isinstance(brought, Staged) else brought

    def put(self, tree: Any) -> Any:
        """Puts host arrays on the device, or on all of a mesh, for inputs that many program calls share."""
        import jax

        whole = self.opened.device.whole
        if self.opened.device.group is None:
            return jax.device_put(tree, whole)
        return jax.tree.map(lambda leaf: _on_all_hosts(leaf, whole), tree)

    def _put_weights(self, name: str, tree: Tree) -> Any:
        """Puts a component's host arrays on the device, or their parts on the devices of a mesh."""
        import jax

        if (transfer := self.mesh_transfer(name)) is None:
            return jax.block_until_ready(self.put(tree))
        direct, rows = transfer.put(tree)
        return Staged(direct, rows, functools.partial(self._spread, name)) if rows else nest(direct)

    def _spread(self, name: str, **rows: Any) -> Any:
        """Runs the program that spreads a component's rows."""
        import jax

        (loading,) = self._request_spread(name)
        program = self.opened.waits.result(loading)
        with self.opened.recorder.phase("transfer", f"{name}, spread"):
            return jax.block_until_ready(program(**rows))

    def _request_spread(self, name: str) -> list[Future[Any]]:
        """Starts to load the program that spreads a component, if there is one and rows are staged."""
        profile = self._spread_by(name)
        return [] if profile is None else self.executables.request(profile, [spread_name(name)])

    def _spread_by(self, name: str) -> Profile | None:
        """Returns the first profile of this target with a program that spreads a component; all are alike."""
        opened = self.opened
        if not opened.staged:
            return None
        built = opened.target.executables or opened.program_set.programs
        profiles = (opened.manifest.profiles[profile] for profile in built)
        wanted = spread_name(name)
        return next((profile for profile in profiles if wanted in opened.programs(profile)), None)

    def mesh_transfer(self, name: str) -> Transfer | None:
        """Returns how a component is transferred to the devices of a mesh; None for one device."""
        opened = self.opened
        if opened.device.mesh is None:
            return None
        if name not in self._mesh_transfers:
            profile = self._spread_by(name)
            spread = None if profile is None else opened.programs(profile)[spread_name(name)]
            rules = opened.program_set.rules
            self._mesh_transfers[name] = Transfer(self.components[name], rules, opened.device.mesh, spread)
        return self._mesh_transfers[name]

    def stream(self, name: str) -> LayerStream:
        """Returns a transformer on its way through the device, layer by layer; begins to read it at first."""
        with self._lock:
            if name not in self._streams:
                kept = self.keeps_layers
                self._streams[name] = LayerStream(self.opened, name, self._readers, self.put, kept)
            return self._streams[name]

    def slots(self, options: ProfileOptions, loras: Sequence[AppliedLora] = ()) -> FilledSlots:
        """Returns the slots of programs that are built with these options, as LoRAs fill them."""
        alike = options.lora_rank, options.dtype
        with self._lock:
            if alike not in self._slots:
                self._slots[alike] = Slots(self.opened, options)
            if self._kept_loras is None:
                room = 0 if self.opened.policy.low_memory else Machine.of(self.opened.device.device).available
                self._kept_loras = KeptLoras(None if room is None else int(KEPT_SHARE * room))
            return FilledSlots(self._slots[alike], self._kept_loras, loras, self.components)

    @property
    def keeps_layers(self) -> bool:
        """Whether the layers of all transformers fit into host memory, with the other components."""
        sizes = (component.nbytes for component in self.components.values())
        return Machine.of(self.opened.device.device).host_fits(sum(sizes))

    def release(self, component: str) -> None:
        """Releases a component; it can be requested again. Its memory is free without other references.

        Callers that still wait for it get a CancelledError. A kept host copy stays, and its reads continue.
        """
        with self._lock:
            self._orders.pop(component, None)
            self._weights.pop(component, None)
            if component in self._streams:
                self._streams.pop(component).close()
            if component not in self._kept:
                self._hosts.pop(component, None)
                if component in self._restores:
                    self._restores.pop(component).cancel()
        _free_dropped()

    def close(self) -> None:
        """Cancels what has not started, and releases all weights and executables."""
        self.executables.close()
        with self._lock:
            for restore in self._restores.values():
                restore.cancel()
            self._ahead.stop()
            for stream in self._streams.values():
                stream.close()
            self._streams.clear()
            self._slots.clear()
            self._kept_loras = None
            for pool in (self._readers, self._transfers):
                pool.shutdown(wait=False, cancel_futures=True)
            self._restores.clear()
            self._hosts.clear()
            self._weights.clear()
            self._orders.clear()
        _free_dropped()


def _on_all_hosts(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts this process's parts of an array on its devices; what a program has made is there already."""
    # `device_put` would compare whole arrays of all processes, by a collective that it compiles.
    import jax

    if isinstance(array, jax.Array):
        return array
    return jax.make_array_from_callback(np.shape(array), sharding, lambda index: np.asarray(array)[index])


def _free_dropped() -> None:
    """Frees host memory that CPU device arrays aliased."""
    # jaxlib defers that to its next call or to a garbage collection; the youngest generation suffices.
    gc.collect(0)
