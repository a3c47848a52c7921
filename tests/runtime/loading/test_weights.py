"""Loading two experts: one executable for both, where their copies are, and memory that is really freed."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from crc32c import crc32c

from helpers.damage import PROFILE, flip, linked, own
from helpers.stored_weights import chunk_bytes
from wanrun.artifact.layout import CRC_BYTES, ArrayLayout
from wanrun.artifact.manifest import Component, read_manifest
from wanrun.artifact.parameters import Parameter
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.loading import restore as restore_module
from wanrun.loading import weights as loader_module
from wanrun.loading.buffers import Memory
from wanrun.loading.device import open_device
from wanrun.loading.restore import Restore
from wanrun.loading.weights import Loader
from wanrun.timing import Timings

ROWS, ROW_BYTES = 24, 2 * 2**20
"""Of the component 'big': one chunk file a row, 48 MiB in all."""

LIMIT_SECONDS = 20.0
"""For what takes milliseconds unless something blocks for good."""


def write_big(artifact: Path) -> Component:
    """Writes the component 'big': one float32 array of random values."""
    layout = ArrayLayout((ROWS, ROW_BYTES // 4), "float32", ROWS, ROWS)
    values = np.random.default_rng(7).standard_normal(layout.shape, np.float32)
    checksums = [crc32c(row.tobytes()) for row in values]
    for index, (row, checksum) in enumerate(zip(values, checksums, strict=True)):
        file = artifact / "weights" / "big" / "stack" / layout.chunk_file(index)
        file.parent.mkdir(parents=True)
        file.write_bytes(row.tobytes() + checksum.to_bytes(CRC_BYTES, "little"))
    digest = sha256_of(b"".join(bytes.fromhex(sha256_of(row.tobytes())) for row in values))
    checksums_of_rows = tuple(f"{checksum:08x}" for checksum in checksums)
    parameter = Parameter(layout=layout, axes=("layers", None), crc32c=checksums_of_rows, sha256=digest)
    return Component("weights/big", {"stack": parameter})


@pytest.fixture(scope="module")
def shared(two_experts_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy of two experts with a component more, 'big'. Not to be changed."""
    artifact = linked(two_experts_artifact, tmp_path_factory.mktemp("experts") / "artifact")
    own(artifact, "weights")
    manifest = read_manifest(artifact)
    manifest.changed(components={**manifest.components, "big": write_big(artifact)}).write(artifact)
    return artifact


@pytest.fixture
def artifact(shared: Path, tmp_path: Path) -> Path:
    """The same, with weights of its own."""
    copy = linked(shared, tmp_path / "artifact")
    own(copy, "weights")
    return copy


Load = Callable[..., Loader]


@pytest.fixture
def load() -> Iterator[Load]:
    """Makes loaders, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(artifact: Path, **options: Any) -> Loader:
            manifest, timings = read_manifest(artifact), Timings()
            profile = manifest.profiles[PROFILE]
            selected = select_target(manifest, profile)
            device = open_device(selected, False, timings, print)
            made = Loader(
                artifact, manifest, profile, selected, device, timings=timings, warn=print, **options
            )
            stack.callback(made.close)
            return made

        yield make


class Watch:
    """What the loaders of a test did: components read, transfers, and the blocks they read into."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.moved = 0
        self.blocks: list[weakref.ref[Any]] = []

    def freed(self) -> bool:
        """Whether every block is gone, maybe a moment from now: a thread lets go of its part when it ends.

        Without a garbage collection: one that is needed would come by chance.
        """
        return eventually(lambda: all(block() is None for block in self.blocks))


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 2.0
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches, and keeps the garbage collector from running by itself."""
    seen = Watch()
    real_put = jax.device_put

    class WatchedMemory(Memory):
        def __init__(self, component: Component) -> None:
            super().__init__(component)
            seen.blocks.append(weakref.ref(self._block))

    class WatchedRestore(Restore):
        def __init__(self, artifact: Path, name: str, *arguments: Any, **options: Any) -> None:
            seen.read.append(name)
            super().__init__(artifact, name, *arguments, **options)

    def put(*arguments: Any, **options: Any) -> Any:
        seen.moved += 1
        return real_put(*arguments, **options)

    monkeypatch.setattr(restore_module, "Memory", WatchedMemory)
    monkeypatch.setattr(loader_module, "Restore", WatchedRestore)
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


def settled(loader: Loader, name: str) -> Any:
    """A component's weights, when the threads that brought them have let go of their part."""
    (reading,) = loader.prefetch([name])
    copy = weakref.ref(reading)
    del reading
    weights = loader.weights(name)
    assert eventually(lambda: copy() is None)
    assert eventually(lambda: all(thread.name != "touch" for thread in threading.enumerate()))
    return weights


def leaf(tree: Any) -> jax.Array:
    return jax.tree.leaves(tree)[0]


# --- one executable, two experts ---------------------------------------------------------------------------


def test_a_program_is_bound_to_either_expert(shared: Path, load: Load) -> None:
    loader = load(shared)
    first = loader.bound("denoise_step")
    second = loader.bound("denoise_step", transformer="transformer_2")
    assert first.func is second.func  # type: ignore[attr-defined]
    assert loader._timings.cache_hits == 1
    manifest = read_manifest(shared)
    contents = []
    for bound, name in ((first, "transformer"), (second, "transformer_2")):
        weights = loader.weights(name)
        assert bound.keywords == {"transformer": weights}  # type: ignore[attr-defined]
        component = manifest.components[name]
        expected = chunk_bytes(shared / component.folder, component)
        found = {
            "/".join(key.key for key in path): np.asarray(value).tobytes()
            for path, value in jax.tree_util.tree_leaves_with_path(weights)
        }
        assert found == expected
        contents.append(found)
    assert contents[0] != contents[1]
    shape = manifest.configs["text_encoder"]["d_model"]
    embeddings = np.random.default_rng(3).standard_normal((2, 512, shape), np.float32)
    kv = [
        leaf(loader.bound("prepare", transformer=name)(embeddings=embeddings)["kv"])
        for name in ("transformer", "transformer_2")
    ]
    # Random weights: they have nothing in common.
    assert np.abs(np.asarray(kv[0]) - np.asarray(kv[1])).max() > 0.1


@pytest.mark.parametrize("wrong", [{"vae": "vae"}, {"latents": "transformer"}, {"x": "transformer"}])
def test_what_a_program_does_not_take_is_not_bound(
    shared: Path, load: Load, wrong: dict[str, str], watch: Watch
) -> None:
    loader = load(shared)
    with pytest.raises(ValueError, match=f"denoise_step takes no weights .'{next(iter(wrong))}'"):
        loader.bound("denoise_step", **wrong)
    assert watch.read == []


# --- the host's copy ---------------------------------------------------------------------------------------


def test_prefetch_reads_and_does_not_move(shared: Path, load: Load, watch: Watch) -> None:
    loader = load(shared)
    (reading,) = loader.prefetch(["transformer_2"])
    reading.result(LIMIT_SECONDS)
    assert (watch.read, watch.moved) == (["transformer_2"], 0)
    loader.prefetch(["transformer_2"])
    loader.weights("transformer_2")
    assert (watch.read, watch.moved) == (["transformer_2"], 1)
    (there,) = loader.prefetch(["transformer_2"])
    assert there.result(LIMIT_SECONDS) is loader.weights("transformer_2")
    assert (watch.read, watch.moved) == (["transformer_2"], 1)


def test_a_request_behind_a_prefetch_waits_for_its_reads(shared: Path, load: Load, watch: Watch) -> None:
    loader = load(shared)
    loader.prefetch(["big"])
    (moving,) = loader.request(components=["big"])
    assert leaf(moving.result(LIMIT_SECONDS)).nbytes == ROWS * ROW_BYTES
    assert (watch.read, watch.moved) == (["big"], 1)


@pytest.mark.parametrize("kept", [True, False])
def test_a_kept_component_comes_back_without_being_read(
    artifact: Path, load: Load, watch: Watch, own_memory: None, kept: bool
) -> None:
    loader = load(artifact, keep_on_host=frozenset({"big"} if kept else ()))
    before = np.asarray(leaf(loader.weights("big"))).copy()
    shutil.rmtree(artifact / "weights" / "big")
    for _ in range(2):
        loader.release("big")
        if not kept:
            with pytest.raises(ArtifactError, match="big/stack, the file cannot be read"):
                loader.weights("big")
            continue
        np.testing.assert_array_equal(np.asarray(leaf(loader.weights("big"))), before)
    assert watch.read == ["big"] * (1 if kept else 3)


def test_a_component_that_is_not_kept_is_read_again(shared: Path, load: Load, watch: Watch) -> None:
    loader = load(shared)
    for _ in range(2):
        loader.weights("transformer")
        loader.release("transformer")
    assert watch.read == ["transformer", "transformer"]


@pytest.mark.parametrize("threads", [1, 4])
def test_nothing_waits_for_ever(
    shared: Path, load: Load, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """As many requests at once as there are, in every order, with transfers that wait for later reads."""
    monkeypatch.setattr(loader_module, "default_threads", lambda: threads)
    names = list(read_manifest(shared).components)
    loader = load(shared, keep_on_host=frozenset({"vae"}))
    random = np.random.default_rng(11)
    for _ in range(5):
        futures: list[Future[Any]] = []
        for name in random.permutation(names * 2):
            futures += loader.prefetch([name]) if random.integers(2) else loader.request(components=[name])
        for name in random.choice(names, 3):
            loader.release(name)
        futures += loader.request(components=names)
        for future in futures:
            with contextlib.suppress(CancelledError):  # of what was released
                future.result(LIMIT_SECONDS)
        assert all(loader.weights(name) for name in names)
        loader.raise_failures()
        for name in names:
            loader.release(name)


# --- memory ------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_on_the_cpu_release_frees_the_block(shared: Path, load: Load, watch: Watch) -> None:
    loader = load(shared)
    weights = settled(loader, "big")
    assert leaf(weights).nbytes == ROWS * ROW_BYTES
    (block,) = watch.blocks
    resident = resident_bytes()
    del weights
    assert block() is not None
    loader.release("big")
    assert block() is None
    # Half of it: other threads may allocate meanwhile.
    assert resident - resident_bytes() > ROWS * ROW_BYTES / 2


def test_a_block_is_gone_before_the_next_is_made(shared: Path, load: Load, watch: Watch) -> None:
    """Also when whoever released it let go a moment later: of two experts one at a time is in memory."""
    loader = load(shared)
    held = settled(loader, "big")
    loader.release("big")
    (block,) = watch.blocks
    assert leaf(held) is not None and block() is not None
    del held
    loader.request(components=["transformer"])
    assert block() is None


def test_a_bound_program_holds_its_weights(shared: Path, load: Load, watch: Watch) -> None:
    loader = load(shared)
    settled(loader, "transformer")
    step = loader.bound("denoise_step")
    loader.release("transformer")
    assert watch.blocks[0]() is not None and step is not None
    del step
    loader.request(components=["vae"])
    assert watch.blocks[0]() is None


def test_a_device_s_own_memory_does_not_cost_the_host_s(
    shared: Path, load: Load, watch: Watch, own_memory: None
) -> None:
    loader = load(shared)
    for name in ("big", "transformer"):
        loader.prefetch(["big"])
        assert leaf(loader.weights(name)) is not None
    assert watch.freed()
    arrays = [weakref.ref(leaf(loader.weights(name))) for name in ("big", "transformer")]
    loader.release("big")
    assert eventually(lambda: arrays[0]() is None)
    assert arrays[1]() is not None


def test_a_kept_block_stays_until_the_end(shared: Path, load: Load, watch: Watch, own_memory: None) -> None:
    loader = load(shared, keep_on_host=frozenset({"big"}))
    array = weakref.ref(leaf(loader.weights("big")))
    loader.release("big")
    (block,) = watch.blocks
    assert eventually(lambda: array() is None)
    assert block() is not None
    loader.close()
    assert block() is None


def test_close_lets_go_of_memory_that_was_made_ahead(shared: Path, load: Load) -> None:
    memory = Memory(read_manifest(shared).components["big"])
    block, stop = weakref.ref(memory._block), memory._stop
    loader = load(shared, memories={"big": memory})
    del memory
    loader.close()
    assert stop.is_set() and block() is None


# --- released while it is being read -----------------------------------------------------------------------


class Gate:
    """Holds up the reading of 'big' after its first chunks."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.chunks = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held, real = Gate(), restore_module._read_chunk

    def read(chunk: Any, verify: str) -> list[bytes]:
        if chunk.name == "big/stack":
            held.chunks += 1
            held.reached.set()
            held.opened.wait(LIMIT_SECONDS)
        return real(chunk, verify)

    monkeypatch.setattr(restore_module, "_read_chunk", read)
    monkeypatch.setattr(loader_module, "default_threads", lambda: 2)
    yield held
    held.opened.set()


@pytest.mark.parametrize("moving", [True, False], ids=["request", "prefetch"])
def test_release_drops_reads_and_frees_the_block(
    shared: Path, load: Load, watch: Watch, gate: Gate, moving: bool
) -> None:
    loader = load(shared)
    (future,) = loader.request(components=["big"]) if moving else loader.prefetch(["big"])
    assert gate.reached.wait(LIMIT_SECONDS)
    loader.release("big")
    gate.opened.set()
    with pytest.raises(CancelledError):
        future.result(LIMIT_SECONDS)
    del future
    assert gate.chunks <= 2 < ROWS
    assert watch.moved == 0
    assert watch.freed()
    loader.raise_failures()
    assert leaf(loader.weights("big")).nbytes == ROWS * ROW_BYTES
    assert watch.read == ["big", "big"]


def test_a_kept_component_goes_on_being_read(shared: Path, load: Load, watch: Watch, gate: Gate) -> None:
    loader = load(shared, keep_on_host=frozenset({"big"}))
    (moving,) = loader.request(components=["big"])
    assert gate.reached.wait(LIMIT_SECONDS)
    loader.release("big")
    gate.opened.set()
    with pytest.raises(CancelledError):
        moving.result(LIMIT_SECONDS)
    # Where it was released there may be no room for it.
    assert watch.moved == 0
    assert leaf(loader.weights("big")).nbytes == ROWS * ROW_BYTES
    assert (watch.read, watch.moved) == (["big"], 1)


def test_a_second_request_is_not_mistaken_for_the_first(
    shared: Path, load: Load, watch: Watch, gate: Gate
) -> None:
    loader = load(shared, keep_on_host=frozenset({"big"}))
    (first,) = loader.request(components=["big"])
    loader.release("big")
    (second,) = loader.request(components=["big"])
    gate.opened.set()
    assert leaf(second.result(LIMIT_SECONDS)) is not None
    with pytest.raises(CancelledError):
        first.result(LIMIT_SECONDS)
    assert watch.moved == 1


def test_close_while_reading(shared: Path, load: Load, watch: Watch, gate: Gate) -> None:
    loader = load(shared)
    futures = [*loader.request(components=["big", "vae"]), *loader.prefetch(["transformer_2"])]
    assert gate.reached.wait(LIMIT_SECONDS)
    loader.close()
    gate.opened.set()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(LIMIT_SECONDS)
    futures.clear()
    del future
    assert watch.moved == 0
    assert watch.freed()


def test_a_cancelled_restore_gives_nothing(shared: Path) -> None:
    """Not even when all has been read by then."""
    component = read_manifest(shared).components["vae"]
    with ThreadPoolExecutor(2) as pool:
        reading = Restore(shared, "vae", component, pool)
        assert reading.result()
        reading.cancel()
        with pytest.raises(CancelledError):
            reading.result()


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_damage_of_what_is_prefetched_is_seen_everywhere(artifact: Path, load: Load, kept: bool) -> None:
    (*_, file) = sorted((artifact / "weights" / "transformer_2").rglob("c/**/0"))
    flip(file, 0)
    loader = load(artifact, keep_on_host=frozenset({"transformer_2"} if kept else ()))
    loader.weights("transformer")
    loader.raise_failures()
    (reading,) = loader.prefetch(["transformer_2"])
    error = reading.exception(LIMIT_SECONDS)
    assert isinstance(error, ArtifactError) and "weights are damaged: transformer_2/" in str(error)
    for use in (
        loader.raise_failures,
        lambda: loader.weights("transformer_2"),
        lambda: loader.bound("denoise_step", transformer="transformer_2"),
        loader.raise_failures,
    ):
        with pytest.raises(ArtifactError) as caught:
            use()
        assert caught.value is error
    assert loader.bound("denoise_step") is not None  # the first expert is whole
    if not kept:
        flip(file, 0)
        loader.release("transformer_2")
        loader.raise_failures()
        assert loader.weights("transformer_2")
