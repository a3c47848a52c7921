"""The memory of a component: its layout, and touching it ahead of the reads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

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
    """The system's madvise, whose calls are recorded and whose populating may take long or fail."""

    def __init__(self, seconds: float = 0.0, fails: bool = False) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._seconds, self._fails = seconds, fails
        self._real = module._madvise()

    def __call__(self, address: int, length: int, advice: int) -> int:
        self.calls.append((address, length, advice))
        if advice == module.MADV_POPULATE_WRITE:
            time.sleep(self._seconds)
            if self._fails:
                return -1
        assert self._real is not None
        return self._real(address, length, advice)

    def advised(self, advice: int) -> list[int]:
        return [length for _, length, given in self.calls if given == advice]


@pytest.fixture
def madvise(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(**options: Any) -> Madvise:
        fake = Madvise(**options)
        monkeypatch.setattr(module, "_madvise", lambda: fake)
        return fake

    return use


def test_every_parameter_has_a_place_of_its_own() -> None:
    parts = component(**LARGE)
    memory, random = Memory(parts), np.random.default_rng(1)
    contents = {path: random.bytes(p.layout.nbytes) for path, p in parts.parameters.items()}
    for path, parameter in parts.parameters.items():
        memory.view(path, parameter.layout)[:] = contents[path]
    for path, parameter in parts.parameters.items():
        array = memory.array(path, parameter.layout, bits=False)
        assert array.shape == parameter.layout.shape and array.dtype.name == parameter.layout.dtype
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.tobytes() == contents[path]
        bits = memory.array(path, parameter.layout, bits=True)
        assert bits.dtype == (np.uint16 if parameter.layout.dtype == "bfloat16" else array.dtype)
        assert bits.tobytes() == contents[path]


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


def test_every_page_is_touched_once(madvise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = madvise()
    monkeypatch.setattr(module, "HUGE_BYTES_PER_SECOND", 1.0)
    parts = component(**LARGE)
    Memory(parts).touch()
    total = sum(-(-p.layout.nbytes // ALIGNMENT) * ALIGNMENT for p in parts.parameters.values())
    assert sum(fake.advised(module.MADV_POPULATE_WRITE)) == total
    assert fake.advised(module.MADV_HUGEPAGE) == [total]
    assert fake.advised(module.MADV_NOHUGEPAGE) == []


def test_huge_pages_are_given_up_where_they_are_slow(madvise: Any) -> None:
    fake = madvise(seconds=2 * module.TOUCHED_BYTES / module.HUGE_BYTES_PER_SECOND)
    parts = component(**LARGE)
    Memory(parts).touch()
    (whole,) = fake.advised(module.MADV_HUGEPAGE)
    assert fake.advised(module.MADV_NOHUGEPAGE) == [whole]  # once
    assert [advice for _, _, advice in fake.calls[:3]] == [
        module.MADV_HUGEPAGE,
        module.MADV_POPULATE_WRITE,
        module.MADV_NOHUGEPAGE,
    ]
    assert sum(fake.advised(module.MADV_POPULATE_WRITE)) == whole


def test_it_can_be_stopped(madvise: Any) -> None:
    fake = madvise(seconds=0.05)
    memory = Memory(component(a=((64, 2**20), "float32")))
    memory.touch_ahead()
    time.sleep(0.12)
    memory.stop()
    touched = len(fake.advised(module.MADV_POPULATE_WRITE))
    time.sleep(0.2)
    assert touched <= len(fake.advised(module.MADV_POPULATE_WRITE)) <= touched + 1 < 32


def test_a_system_that_cannot(madvise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = madvise(fails=True)  # a kernel before 5.14
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
