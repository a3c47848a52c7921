"""The memory of a component: private, and touched ahead of the reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from helpers.manifests import plain_parameter
from helpers.refusals import refuses
from wanbuild.conversion.orbax import plan_layout
from wanrun.artifact.layout import ALIGNMENT, ArrayLayout
from wanrun.artifact.manifest import Component
from wanrun.errors import ArtifactError
from wanrun.weights import buffers as module
from wanrun.weights.buffers import Memory


def component(**shapes: tuple[tuple[int, ...], str]) -> Component:
    return Component("c", {path: plain_parameter(shape, dtype) for path, (shape, dtype) in shapes.items()})


LARGE = {"a": ((2048, 2048), "float32"), "b": ((3, 5), "bfloat16"), "c": ((7,), "float16")}


class Madvise:
    """The system's madvise, recorded; populating takes a time or fails.

    Attributes:
        calls: the advice and length of each call.
        then: called with each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0, fails: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []
        self.then: Callable[[], object] = list
        self._seconds, self._fails, self._clock = seconds, fails, 0.0
        real = module._madvise()
        assert real is not None
        self._real = real
        monkeypatch.setattr(module, "_madvise", lambda: self)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self._clock))

    def __call__(self, address: int, length: int, advice: int) -> int:
        self.calls.append((advice, length))
        self.then()
        if advice == module.MADV_POPULATE_WRITE:
            self._clock += self._seconds * length / module.TOUCHED_BYTES
            if self._fails:
                return -1
        return self._real(address, length, advice)

    def advised(self, advice: int) -> list[int]:
        return [length for given, length in self.calls if given == advice]


def test_touching_changes_nothing_and_may_race_with_the_reads() -> None:
    parts = component(**LARGE)
    memory, layout = Memory(parts), parts.parameters["a"].layout
    view, content = memory.view("a", layout), np.random.default_rng(2).bytes(layout.nbytes)
    thread = threading.Thread(target=memory.touch)
    thread.start()
    for begin in range(0, layout.nbytes, 65536):
        view[begin : begin + 65536] = content[begin : begin + 65536]
    thread.join()
    memory.touch()
    assert bytes(view) == content


@pytest.mark.parametrize("slow", [True, False])
def test_every_page_is_touched_once(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages are given up where they are slow, and once."""
    seconds = (2 if slow else 0.5) * module.TOUCHED_BYTES / module.HUGE_BYTES_PER_SECOND
    fake, parts = Madvise(monkeypatch, seconds), component(**LARGE)
    Memory(parts).touch()
    total = sum(-(-p.layout.nbytes // ALIGNMENT) * ALIGNMENT for p in parts.parameters.values())
    assert sum(fake.advised(module.MADV_POPULATE_WRITE)) == total
    assert fake.advised(module.MADV_HUGEPAGE) == [total]
    assert fake.advised(module.MADV_NOHUGEPAGE) == ([total] if slow else [])
    assert fake.calls[2][0] == (module.MADV_NOHUGEPAGE if slow else module.MADV_POPULATE_WRITE)


def test_touching_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, memory = Madvise(monkeypatch), Memory(component(a=((64, 2**20), "float32")))
    fake.then = lambda: len(fake.calls) == 3 and memory.stop()
    memory.touch()
    assert len(fake.calls) == 3


def test_a_system_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Madvise(monkeypatch, fails=True)  # a kernel before 5.14
    Memory(component(**LARGE)).touch()
    assert len(fake.advised(module.MADV_POPULATE_WRITE)) == 1
    monkeypatch.setattr(module, "_madvise", lambda: None)
    Memory(component(**LARGE)).touch()


def test_the_memory_is_private() -> None:
    """First touch of a shared mapping costs twice as much, and it would be shared with forked processes."""
    memory = Memory(component(**LARGE))
    layout = plan_layout(*LARGE["a"], stacked=False)
    address = memory.array("a", layout, bits=False).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "rw-p"
            return
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("rows", [2**50, 2**80])
def test_more_than_any_machine_has(rows: int) -> None:
    """As a manifest may say, whose maker signs it."""
    layout = ArrayLayout((rows, 4), "float32", 1, 1)
    parameter = msgspec.structs.replace(plain_parameter((1, 4), "float32"), layout=layout)
    with refuses("out_of_memory", ArtifactError, what=" c ", expected="B"):
        Memory(Component("c", {"a": parameter}))
