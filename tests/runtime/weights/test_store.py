"""Weights: where their copies are, what is read when or ahead, and memory that is really freed."""

from __future__ import annotations

import contextlib
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.damage import flip, linked, own
from helpers.memory import resident_bytes
from helpers.opened import LIMIT_SECONDS, ROW_BYTES, ROWS, Opened, Watch, eventually, settled
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.generation.futures import unfinished, when_done
from wanrun.opened.policy import LoadPolicy
from wanrun.weights import restore as restore_module
from wanrun.weights import store as weights_module
from wanrun.weights.buffers import Memory
from wanrun.weights.readahead import ReadAhead
from wanrun.weights.restore import Restore
from wanrun.weights.store import WeightStore

# --- store ---


Load = Callable[..., WeightStore]


@pytest.fixture
def artifact(shared: Path, tmp_path: Path) -> Path:
    """The same, with weights of its own."""
    copy = linked(shared, tmp_path / "artifact")
    own(copy, "weights")
    return copy


@pytest.fixture
def load(open_here: Callable[..., Opened]) -> Load:
    """Makes stores of weights, which are closed at the end."""

    def make(artifact: Path, keep_on_host: Iterable[str] = (), **options: Any) -> WeightStore:
        weights: WeightStore = open_here(artifact, **options).weights
        weights.keep_on_host(keep_on_host)
        return weights

    return make


def leaf(tree: Any) -> jax.Array:
    return jax.tree.leaves(tree)[0]


# --- the host's copy ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prefetch_reads_and_does_not_move(shared: Path, load: Load, watch: Watch) -> None:
    """A request after it waits for its reads."""
    store = load(shared)
    (reading,) = store.prefetch(["transformer_2"])
    reading.result(LIMIT_SECONDS)
    assert (watch.read, watch.moved) == (["transformer_2"], 0)
    store.prefetch(["transformer_2", "big"])
    (moving,) = store.request(["big"])
    assert leaf(moving.result(LIMIT_SECONDS)).nbytes == ROWS * ROW_BYTES
    store.weights("transformer_2")
    assert (watch.read, watch.moved) == (["transformer_2", "big"], 2)
    (there,) = store.prefetch(["transformer_2"])
    assert there.result(LIMIT_SECONDS) is store.weights("transformer_2")
    assert (watch.read, watch.moved) == (["transformer_2", "big"], 2)


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [True, False])
def test_a_kept_component_comes_back_without_being_read(
    artifact: Path, load: Load, watch: Watch, own_memory: None, kept: bool
) -> None:
    store = load(artifact, keep_on_host={"big"} if kept else ())
    before = np.asarray(leaf(store.weights("big"))).copy()
    shutil.rmtree(artifact / "weights" / "big")
    for _ in range(2):
        store.release("big")
        if not kept:
            with refuses("damaged", ArtifactError, what="big/stack"):
                store.weights("big")
            continue
        np.testing.assert_array_equal(np.asarray(leaf(store.weights("big"))), before)
    assert watch.read == ["big"] * (1 if kept else 3)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_nothing_waits_for_ever(
    shared: Path, load: Load, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """As many requests at once as there are, in every order, with transfers that wait for later reads."""
    monkeypatch.setattr(weights_module, "default_threads", lambda: threads)
    names = list(read_manifest(shared).components)
    store = load(shared, keep_on_host={"vae"})
    random = np.random.default_rng(11)
    for _ in range(5):
        futures: list[Future[Any]] = []
        for name in random.permutation(names * 2):
            futures += store.prefetch([name]) if random.integers(2) else store.request([name])
        for name in random.choice(names, 3):
            store.release(name)
        futures += store.request(names)
        for future in futures:
            with contextlib.suppress(CancelledError):  # of what was released
                future.result(LIMIT_SECONDS)
        assert all(store.weights(name) for name in names)
        assert unfinished(store.request(names)) == []
        for name in names:
            store.release(name)


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_the_cpu_release_frees_the_block(shared: Path, load: Load, watch: Watch) -> None:
    store = load(shared)
    weights = settled(store, "big")
    assert leaf(weights).nbytes == ROWS * ROW_BYTES
    (block,) = watch.blocks
    resident = resident_bytes()
    del weights
    assert block() is not None
    store.release("big")
    assert block() is None
    # Half of it: other threads may allocate meanwhile.
    assert resident - resident_bytes() > ROWS * ROW_BYTES / 2


@pytest.mark.slow
def test_a_block_is_gone_before_the_next_is_made(shared: Path, load: Load, watch: Watch) -> None:
    """Also when whoever released it let go a moment later: of two experts one at a time is in memory."""
    store = load(shared)
    held = settled(store, "big")
    store.release("big")
    (block,) = watch.blocks
    assert leaf(held) is not None and block() is not None
    del held
    store.request(["transformer"])
    assert block() is None


@pytest.mark.slow
def test_a_device_s_own_memory_does_not_cost_the_host_s(
    shared: Path, load: Load, watch: Watch, own_memory: None
) -> None:
    store = load(shared)
    for name in ("big", "transformer"):
        store.prefetch(["big"])
        assert leaf(store.weights(name)) is not None
    assert watch.freed()
    arrays = [weakref.ref(leaf(store.weights(name))) for name in ("big", "transformer")]
    store.release("big")
    assert eventually(lambda: arrays[0]() is None)
    assert arrays[1]() is not None


@pytest.mark.slow
def test_a_kept_block_stays_until_the_end(shared: Path, load: Load, watch: Watch, own_memory: None) -> None:
    store = load(shared, keep_on_host={"big"})
    array = weakref.ref(leaf(store.weights("big")))
    store.release("big")
    (block,) = watch.blocks
    assert eventually(lambda: array() is None)
    assert block() is not None
    store.close()
    assert block() is None


@pytest.mark.slow
def test_close_lets_go_of_memory_that_was_made_ahead(
    shared: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "touch_ahead", lambda self: None)  # its thread would hold the memory for long
    ahead = ReadAhead(shared, LoadPolicy())
    ahead.touch("big", read_manifest(shared).components["big"])
    ahead.read("cpu")  # which starts at once: nothing is read
    memory = ahead._memories["big"]
    block, stop = weakref.ref(memory._block), memory._stop
    store = load(shared, ahead=ahead)
    del memory
    store.close()
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

    def read(chunk: Any, verify: str, direct: bool) -> list[bytes]:
        if chunk.name == "big/stack":
            held.chunks += 1
            held.reached.set()
            held.opened.wait(LIMIT_SECONDS)
        return real(chunk, verify, direct)

    monkeypatch.setattr(restore_module, "_read_chunk", read)
    monkeypatch.setattr(weights_module, "default_threads", lambda: 2)
    yield held
    held.opened.set()


@pytest.mark.thorough
@pytest.mark.parametrize("moving", [True, False], ids=["request", "prefetch"])
def test_release_drops_reads_and_frees_the_block(
    shared: Path, load: Load, watch: Watch, gate: Gate, moving: bool
) -> None:
    store = load(shared)
    (future,) = store.request(["big"]) if moving else store.prefetch(["big"])
    assert gate.reached.wait(LIMIT_SECONDS)
    store.release("big")
    gate.opened.set()
    with pytest.raises(CancelledError):
        future.result(LIMIT_SECONDS)
    del future
    assert gate.chunks <= 2 < ROWS
    assert watch.moved == 0
    assert watch.freed()
    assert leaf(store.weights("big")).nbytes == ROWS * ROW_BYTES
    assert watch.read == ["big", "big"]


@pytest.mark.slow
def test_a_kept_component_goes_on_being_read(shared: Path, load: Load, watch: Watch, gate: Gate) -> None:
    store = load(shared, keep_on_host={"big"})
    (moving,) = store.request(["big"])
    assert gate.reached.wait(LIMIT_SECONDS)
    store.release("big")
    gate.opened.set()
    with pytest.raises(CancelledError):
        moving.result(LIMIT_SECONDS)
    # Where it was released there may be no room for it.
    assert watch.moved == 0
    assert leaf(store.weights("big")).nbytes == ROWS * ROW_BYTES
    assert (watch.read, watch.moved) == (["big"], 1)


@pytest.mark.slow
def test_a_second_request_is_not_mistaken_for_the_first(
    shared: Path, load: Load, watch: Watch, gate: Gate
) -> None:
    store = load(shared, keep_on_host={"big"})
    (first,) = store.request(["big"])
    store.release("big")
    (second,) = store.request(["big"])
    gate.opened.set()
    assert leaf(second.result(LIMIT_SECONDS)) is not None
    with pytest.raises(CancelledError):
        first.result(LIMIT_SECONDS)
    assert watch.moved == 1


@pytest.mark.slow
def test_close_while_reading(shared: Path, load: Load, watch: Watch, gate: Gate) -> None:
    store = load(shared)
    futures = [*store.request(["big", "vae"]), *store.prefetch(["transformer_2"])]
    assert gate.reached.wait(LIMIT_SECONDS)
    store.close()
    gate.opened.set()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(LIMIT_SECONDS)
    futures.clear()
    del future
    assert watch.moved == 0
    assert watch.freed()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_damage_of_what_is_prefetched_is_seen_everywhere(
    artifact: Path, open_here: Callable[..., Opened], kept: bool
) -> None:
    (*_, file) = sorted((artifact / "weights" / "transformer_2").rglob("c/**/0"))
    flip(file, 0)
    opened = open_here(artifact)
    store, programs = opened.weights, opened.programs()
    store.keep_on_host({"transformer_2"} if kept else ())
    store.weights("transformer")
    assert unfinished(store.prefetch(["transformer"])) == []
    (reading,) = store.prefetch(["transformer_2"])
    error = reading.exception(LIMIT_SECONDS)
    assert isinstance(error, ArtifactError)
    check_refusal(error, "damaged", what="transformer_2/")
    for use in (
        lambda: unfinished(store.prefetch(["transformer_2"])),
        lambda: store.weights("transformer_2"),
        lambda: programs.bound("denoise_step", transformer="transformer_2"),
        lambda: unfinished(store.request(["transformer_2"])),
    ):
        with pytest.raises(ArtifactError) as caught:
            use()
        assert caught.value is error
    assert programs.bound("denoise_step") is not None  # the first expert is whole
    if not kept:
        flip(file, 0)
        store.release("transformer_2")
        assert store.weights("transformer_2")


# --- ahead ---


@pytest.fixture
def ahead(shared: Path) -> ReadAhead:
    made = ReadAhead(shared, LoadPolicy())
    made.touch("big", read_manifest(shared).components["big"])
    return made


@pytest.mark.slow
def test_what_was_read_is_taken(
    shared: Path, ahead: ReadAhead, open_here: Callable[..., Opened], watch: Watch
) -> None:
    ahead.read("cuda")
    (restore,) = ahead._restores.values()
    restore.result()
    opened = open_here(shared, ahead=ahead)
    taken = opened.weights.weights("big")
    (span,) = (span for span in opened.timings.labelled_spans if span.name == "restore big")
    assert (span.start, span.end) == (restore.started_at, restore.ended_at)
    assert (watch.read, watch.moved) == ([], 1)
    again = open_here(shared).weights.weights("big")
    assert watch.read == ["big"]
    assert jax.tree.all(jax.tree.map(np.array_equal, taken, again))


@pytest.mark.slow
def test_what_nobody_takes_is_let_go_of(ahead: ReadAhead) -> None:
    ahead.read("tpu")
    (restore,) = ahead._restores.values()
    ahead.stop()
    assert ahead.restore("big") is ahead.memory("big") is None
    with pytest.raises(CancelledError):
        restore.result()


# --- futures ---


@pytest.mark.parametrize(
    "end", [lambda one: one.set_result(None), Future.cancel, lambda one: one.set_exception(OSError())]
)
def test_all_have_to_succeed(end: Callable[[Future[Any]], Any]) -> None:
    """What is there already counts; one that fails or is dropped is never all."""
    calls: list[int] = []
    there, first, second = (Future[Any]() for _ in range(3))
    there.set_result(None)
    when_done([there], lambda: calls.append(0))
    when_done([there, first, second], lambda: calls.append(1))
    end(second)
    assert calls == [0]
    first.set_result(None)
    assert calls == ([0] if second.cancelled() or second.exception() else [0, 1])


def test_those_that_are_not_done_or_the_first_failure() -> None:
    first, second, failed, worse = (Future[Any]() for _ in range(4))
    second.set_result(None)
    assert unfinished([first, second]) == [first] and unfinished([]) == []
    failed.set_exception(OSError("gone"))
    worse.set_exception(ValueError("worse"))
    with pytest.raises(OSError, match="gone"):
        unfinished([first, second, failed, worse])
    assert first.cancel()
    with pytest.raises(CancelledError):
        unfinished([first])
