"""Layers on their way through the device: their order, their values, what is read, and what is kept."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from helpers.damage import flip, linked, own
from helpers.opened import LIMIT_SECONDS, Opened
from helpers.refusals import refuses
from wanrun.artifact.parameters import Tree, flat
from wanrun.errors import ArtifactError, CancelledError
from wanrun.opened.cancel import CancelToken, Waits
from wanrun.weights import layers as layers_module
from wanrun.weights.buffers import Memory
from wanrun.weights.layers import AHEAD, LayerStream, order_of, parts_of
from wanrun.weights.restore import Restore

LAYERS = 3


@pytest.fixture
def streaming(shared: Path, open_here: Callable[..., Opened]) -> Iterator[Callable[..., LayerStream]]:
    """Makes streams of an artifact's transformer, which are closed at the end."""
    made: list[LayerStream] = []
    with ThreadPoolExecutor(4) as readers:

        def make(kept: bool, artifact: Path = shared, **changes: Any) -> LayerStream:
            opened = open_here(artifact).opened
            key = opened.selected.target.program_set
            programs = msgspec.structs.replace(opened.program_set, layers={"blocks": tuple(range(LAYERS))})
            sets = {**opened.manifest.program_sets, key: programs}
            artifact_changed = opened.artifact.changed(program_sets=sets)
            opened = dataclasses.replace(opened, artifact=artifact_changed, **changes)
            made.append(LayerStream(opened, "transformer", readers, jax.device_put, kept))
            return made[-1]

        yield make
        for stream in made:
            stream.close()


def whole(opened: Opened) -> dict[str, np.ndarray]:
    """The transformer's parameters by path, read all at once."""
    return {path: np.asarray(one) for path, one in flat(opened.weights.weights("transformer")).items()}


def as_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Copies: the memory of a layer is used again."""
    return {path: np.array(one) for path, one in flat(tree).items()}


def test_the_order() -> None:
    assert order_of({"blocks": (0, 1, 2)}) == [("blocks", 0), ("blocks", 1), ("blocks", 2)]
    assert order_of({"blocks": (0, 1, 2, 3), "vace_blocks": (0, 2)}) == [
        ("blocks", 0),
        ("vace_blocks", 0),
        ("blocks", 1),
        ("blocks", 2),
        ("vace_blocks", 1),
        ("blocks", 3),
    ]
    # The first stack comes first, whatever the names.
    assert order_of({"zebra": (0, 1), "ape": (1,)}) == [("zebra", 0), ("zebra", 1), ("ape", 0)]


@pytest.mark.slow
def test_each_parameter_is_in_one_part(shared: Path, open_here: Callable[..., Opened]) -> None:
    component = open_here(shared).opened.manifest.components["transformer"]
    parts = parts_of(component, ["blocks"])
    paths = [path for part in parts.values() for path in part.parameters]
    assert sorted(paths) == sorted(component.parameters)
    assert all(path.startswith("blocks/") for path in parts["blocks"].parameters)
    assert sum(part.nbytes for part in parts.values()) == component.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_layers_are_those_of_the_stack(
    kept: bool, streaming: Callable[..., LayerStream], shared: Path, open_here: Callable[..., Opened]
) -> None:
    expected, stream = whole(open_here(shared)), streaming(kept)
    for path, value in as_arrays(stream.outside.result()).items():
        np.testing.assert_array_equal(value, expected[path])
    for _ in range(3):
        found = [(stack, number, as_arrays(weights)) for stack, number, weights in stream]
        assert [(stack, number) for stack, number, _ in found] == [("blocks", n) for n in range(LAYERS)]
        for _, number, weights in found:
            assert weights.keys() == {path.removeprefix("blocks/") for path in expected if "blocks/" in path}
            for path, value in weights.items():
                np.testing.assert_array_equal(value, expected[f"blocks/{path}"][number])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_read_and_held(
    kept: bool, streaming: Callable[..., LayerStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are kept are read once; of others a few are in host memory, whose blocks are used again."""
    read, blocks = list[Any](), list[Memory]()

    def restore(*arguments: Any, **options: Any) -> Restore:
        read.append(set(options["rows"].values()))
        return Restore(*arguments, **options)

    def memory(*arguments: Any) -> Memory:
        blocks.append(Memory(*arguments))
        return blocks[-1]

    monkeypatch.setattr(layers_module, "Restore", restore)
    monkeypatch.setattr(layers_module, "Memory", memory)
    stream = streaming(kept)
    for _ in range(3):
        for _layer in stream:
            pass
    stream.close()
    layers = [rows for rows in read if rows]
    assert all(len(rows) == 1 for rows in layers)
    assert len(read) - len(layers) == 1  # what is in no stack
    if kept:
        assert len(layers) == len(blocks) == LAYERS
    else:
        assert 3 * LAYERS <= len(layers) <= 3 * LAYERS + AHEAD
        assert len(blocks) <= 1 + AHEAD


@pytest.mark.slow
def test_it_reads_ahead_of_what_is_used_and_no_further(
    streaming: Callable[..., LayerStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)

    class Counted(Restore):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.release()

    monkeypatch.setattr(layers_module, "Restore", Counted)
    stream = streaming(False)
    stream.outside.result()

    def check_begun(count: int) -> None:
        """So many more are begun, and no other within a while."""
        for _ in range(count):
            assert begun.acquire(timeout=LIMIT_SECONDS)
        assert not begun.acquire(timeout=0.2)

    check_begun(1 + AHEAD)  # what is in no stack, and the first layers
    for _ in stream:
        check_begun(1)


@pytest.mark.slow
def test_a_damaged_layer_is_named(
    streaming: Callable[..., LayerStream], shared: Path, tmp_path: Path
) -> None:
    artifact = linked(shared, tmp_path / "artifact")
    own(artifact, "weights")
    files = (artifact / "weights/transformer/blocks.ffn.up.weight/c").rglob("*")
    (file,) = (path for path in files if path.is_file())
    flip(file, file.stat().st_size - 40)  # in the last layer
    stream = streaming(False, artifact)
    with refuses("damaged", ArtifactError, what="transformer/blocks/ffn/up/weight, row 2"):
        for _layer in stream:
            pass


@pytest.mark.slow
def test_waiting_ends_with_the_call(
    streaming: Callable[..., LayerStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, waits, token = threading.Event(), Waits(), CancelToken()
    result = Restore.result

    def held(self: Restore, bits: bool = False) -> Any:
        gate.wait(LIMIT_SECONDS)
        return result(self, bits)

    monkeypatch.setattr(Restore, "result", held)
    stream = streaming(True, waits=waits)
    token.cancel()
    with waits.until(token), pytest.raises(CancelledError):
        next(iter(stream))
    gate.set()
