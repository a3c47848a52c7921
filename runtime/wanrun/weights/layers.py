"""Streams a transformer through the device: what is in no stack stays there, and layers come in order.

| what | where it runs | waits for |
|---|---|---|
| chunk files of a layer | the pool of reading threads | nothing |
| host copy of a layer | a thread of its own | its chunk files, unless it was kept from an earlier pass |
| transfer of a layer | a thread of its own | its host copy |

``AHEAD`` layers are on their way while one is computed, pass after pass. So the first step begins with its
first layer, and the last layers of a step bring the first ones of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Parameter, Tree
from wanrun.machine.jax_process import own_options
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.weights.buffers import Memory
from wanrun.weights.restore import Restore

AHEAD = 2
"""Layers on their way: one that is being read, and one that is being transferred or is there."""

OUTSIDE = "outside"
"""The programs' input with the weights that are in no stack."""

Layer = tuple[str, int]
"""A stack, and the number of one of its layers."""


def parts_of(component: Component, stacks: Sequence[str]) -> dict[str, Component]:
    """Returns the parameters of each stack, and those ``OUTSIDE``, as components."""
    parts: dict[str, dict[str, Parameter]] = {name: {} for name in (*stacks, OUTSIDE)}
    for path, parameter in component.parameters.items():
        top = path.partition("/")[0]
        parts[top if top in stacks else OUTSIDE][path] = parameter
    return {name: Component(component.folder, parameters) for name, parameters in parts.items()}


def order_of(layers: Mapping[str, Sequence[int]]) -> list[Layer]:
    """Returns all layers in the order in which they run.

    ``layers`` has, for each stack, the layers of the first one that its own follow: see ``ProgramSet``.
    """
    first = next(iter(layers))
    places = [
        (follows, stack != first, stack, number)
        for stack, positions in layers.items()
        for number, follows in enumerate(positions)
    ]
    return [(stack, number) for _, _, stack, number in sorted(places)]


class LayerStream:
    """One transformer on its way through the device. It begins to read at once.

    ``readers`` read chunk files, and ``put`` puts a tree of host arrays on the device. If ``kept``, layers
    stay in host memory once they are read. ``stacks`` are the names of its stacks; ``outside`` is the future
    of the weights in no stack, on the device, as programs take them.
    """

    def __init__(
        self,
        opened: OpenedArtifact,
        name: str,
        readers: ThreadPoolExecutor,
        put: Callable[[Any], Any],
        kept: bool,
    ) -> None:
        layers = opened.program_set.layers
        self.stacks = tuple(layers)
        self._opened, self._name, self._readers, self._put, self._kept = opened, name, readers, put, kept
        self._parts, self._order = parts_of(opened.manifest.components[name], list(layers)), order_of(layers)
        self._copies: dict[Layer, Tree] = {}
        self._spare: dict[str, list[Memory]] = {stack: [] for stack in layers}
        self._restores: dict[Layer, Restore] = {}
        self._asked, self._read_bytes = 0, 0
        nbytes = sum(part.nbytes for part in self._parts.values())
        # The first pass is what a start waits for; later ones are hidden behind the steps.
        self._first = opened.recorder.begin("restore", name, lambda: (self._read_bytes, nbytes))
        self._reading, self._moving = ThreadPoolExecutor(1, "layers"), ThreadPoolExecutor(1, "transfer")
        self.outside = self._moving.submit(lambda: self._moved(self._restored((OUTSIDE, 0))))
        self._coming: deque[Future[tuple[Tree, Memory | None]]] = deque()
        while len(self._coming) < AHEAD:
            self._ask()

    def _ask(self) -> None:
        """Begins to bring the next layer."""
        layer = self._order[self._asked % len(self._order)]
        self._asked += 1
        host = self._reading.submit(self._read, layer)
        self._coming.append(self._moving.submit(self._bring, host))

    def _restored(
        self,
        layer: Layer,
        rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
        memory: Memory | None = None,
    ) -> Tree:
        """Reads these rows of a stack, or what is in none; returns host arrays with the layer axis."""
        part, policy = self._parts[layer[0]], self._opened.policy
        restore = self._restores[layer] = Restore(
            self._opened.artifact.folder,
            self._name,
            part,
            self._readers,
            policy.verify,
            weights=policy.weights,
            memory=memory,
            rows=rows,
            direct=True,
        )
        try:
            tree = restore.result(self._opened.program_set.kernels.weight_bits)
        finally:
            self._restores.pop(layer, None)
        self._opened.recorder.count(restore_bytes=restore.nbytes)
        if not self._first.ended:
            self._read_bytes += restore.nbytes
            if layer == self._order[-1]:
                self._first.nbytes = self._read_bytes
                self._opened.recorder.end(self._first)
        return tree

    def _read(self, layer: Layer) -> tuple[Tree, Memory | None]:
        """Returns a layer's host arrays, and their memory, which another layer may take afterwards."""
        if layer in self._copies:
            return self._copies[layer], None
        stack, number = layer
        part, spare = self._parts[stack], self._spare[stack]
        rows = dict.fromkeys(part.parameters, (number,))
        memory = spare.pop() if spare else Memory(part, rows)
        tree = _without_axis(self._restored(layer, rows, memory)[stack])
        if self._kept:
            self._copies[layer] = tree
        return tree, None if self._kept else memory

    def _bring(self, host: Future[tuple[Tree, Memory | None]]) -> tuple[Tree, Memory | None]:
        tree, memory = host.result()
        return self._moved(tree), memory

    def _moved(self, tree: Tree) -> Tree:
        import jax

        with own_options():
            return jax.block_until_ready(self._put(tree))  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[tuple[str, int, Tree]]:
        """Yields stack, number and weights of every layer, in order; raises ArtifactError if one is damaged.

        When the next one is asked for, the device has to be done with the last.
        """
        for stack, number in self._order:
            weights, memory = self._opened.waits.result(self._coming[0])
            self._coming.popleft()
            self._ask()
            yield stack, number, weights
            del weights
            if memory is not None:
                self._spare[stack].append(memory)

    def close(self) -> None:
        """Ends what is on its way, and releases all weights."""
        for pool in (self._reading, self._moving):
            pool.shutdown(wait=False, cancel_futures=True)
        for restore in list(self._restores.values()):
            restore.cancel()
        self._copies.clear()
        self._coming.clear()
        self._spare.clear()


def _without_axis(tree: Tree) -> Tree:
    """Returns the arrays of one layer without their layer axis, which is of size 1."""
    return {name: _without_axis(item) if isinstance(item, dict) else item[0] for name, item in tree.items()}
