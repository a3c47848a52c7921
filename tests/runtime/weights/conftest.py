"""Fixtures shared by the tests of loading: an artifact to load from, and what was done with its memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.damage import linked, own
from helpers.opened import Opened, Watch, write_big
from wanrun.artifact.manifest import Component, read_manifest
from wanrun.weights import restore as restore_module
from wanrun.weights import store as weights_module
from wanrun.weights.buffers import Memory
from wanrun.weights.restore import Restore


@pytest.fixture(scope="module")
def shared(two_experts_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy of two experts with a component more, 'big'. Not to be changed."""
    artifact = linked(two_experts_artifact, tmp_path_factory.mktemp("experts") / "artifact")
    own(artifact, "weights")
    manifest = read_manifest(artifact)
    manifest.changed(components={**manifest.components, "big": write_big(artifact)}).write(artifact)
    return artifact


@pytest.fixture
def open_here() -> Iterator[Callable[..., Opened]]:
    """Opens artifacts, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(artifact: Path, **options: Any) -> Opened:
            opened = Opened(artifact, **options)
            stack.callback(opened.close)
            return opened

        yield open_one


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches, and keeps the garbage collector from running by itself."""
    seen = Watch()
    real_put = jax.device_put

    class WatchedMemory(Memory):
        def __init__(self, component: Component, *rows: Any) -> None:
            super().__init__(component, *rows)
            seen.blocks.append(weakref.ref(self._block))

    class WatchedRestore(Restore):
        def __init__(self, artifact: Path, name: str, *arguments: Any, **options: Any) -> None:
            seen.read.append(name)
            super().__init__(artifact, name, *arguments, **options)

    def put(*arguments: Any, **options: Any) -> Any:
        seen.moved += 1
        return real_put(*arguments, **options)

    monkeypatch.setattr(restore_module, "Memory", WatchedMemory)
    monkeypatch.setattr(weights_module, "Restore", WatchedRestore)
    monkeypatch.setattr(jax, "device_put", put)
    gc.collect()
    gc.disable()
    yield seen
    gc.enable()


@pytest.fixture
def own_memory(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU a device with memory of its own: what is moved there is copied."""
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tree, device: put(jax.tree.map(np.copy, tree), device))
