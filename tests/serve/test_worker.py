"""The process with the device: what it tells, what it holds, and how its videos fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.manifests import plain_manifest
from wanrun.errors import ArtifactError, NoSpaceError
from wanserve.messages import (
    NO_ROOM,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Now,
    OfWorker,
    Run,
    line,
    of_worker,
    to_worker,
)
from wanserve.pipelines import Pipelines, lacks_memory
from wanserve.worker import Progress, Worker, failure

FULL = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")


class Device:
    """Loads artifacts that take memory, and closes them."""

    def __init__(self, memory: int) -> None:
        self.free, self.closed, self.loads = memory, list[str](), list[str]()
        self.happens: Callable[[], object] = lambda: None

    def load(self, artifact: wanrun.Artifact, **keywords: Any) -> Any:
        name = artifact.folder.name
        self.loads.append(name)
        self.happens()
        if self.free < 10:
            raise FULL
        self.free -= 10

        def close() -> None:
            self.closed.append(name)
            self.free += 10

        return SimpleNamespace(artifact=artifact, manifest=None, close=close, run=self.run)

    def run(self, generation: Any, on_step: Any, timings: Any, cancel: Any) -> Any:
        with timings.phase("text"):
            pass
        with timings.phase("denoise"):
            for step in range(1, 4):
                self.happens()
                on_step(step, 3)
                cancel.check()
            timings.steps("step", 3, 0.3)
        with timings.phase("decode"):
            frames = np.zeros((1, 2, 4, 4, 3), np.uint8)
        saved = lambda path, overwrite: [path]  # noqa: E731
        return SimpleNamespace(frames=frames, options={"seed": 1}, warnings=("cut",), save=saved)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    def resolve(*given: Any, **options: Any) -> None:
        return None

    monkeypatch.setattr(wanrun, "resolve", resolve, raising=False)
    return Device(25)


def pipelines(device: Device, folder: Path) -> Pipelines:
    for name in "abc":
        (folder / name).mkdir(exist_ok=True)
        plain_manifest().write(folder / name)
    artifacts = {name: (str(folder / name), "") for name in "abc"}
    return Pipelines(artifacts, {}, device.load, lambda: None)


def test_the_least_used_is_released_for_want_of_memory(device: Device, tmp_path: Path) -> None:
    held = pipelines(device, tmp_path)
    for name in "abab":
        held.get(name)
    assert device.loads == ["a", "b"] and held.loaded == ["a", "b"]
    held.get("a")
    held.get("c")
    assert device.closed == ["b"] and held.loaded == ["a", "c"]
    assert device.loads == ["a", "b", "c", "c"]  # the first time there was no room
    device.free = -30
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        held.get("b")
    assert held.loaded == []


def test_room_is_made_before_where_it_is_known(device: Device, toy_artifact: Path) -> None:
    """By the bytes of the weights in the manifest."""
    folders = {name: (str(toy_artifact), "") for name in "ab"}
    size = sum(one.nbytes for one in wanrun.open_artifact(toy_artifact).manifest.components.values())
    for free, closed in ((2 * size, 0), (size, 1)):
        device.closed.clear()
        held = Pipelines(folders, {}, device.load, lambda free=free: free)
        held.get("a")
        held.get("b")
        assert len(device.closed) == closed
        device.free = 25


def run(device: Device, folder: Path, cancelled: bool = False) -> tuple[list[OfWorker], bool]:
    told: list[OfWorker] = []
    worker = Worker(told.append, pipelines(device, folder.parent))
    video = Run("1", "a", {"prompt": "p"}, str(folder), "mp4")
    worker.take(video)
    if cancelled:
        worker.take(Cancel("1"))
    worker.take(Cancel("another"))
    return told, worker.run(worker.jobs.get())


def test_a_job_is_told_step_by_step(device: Device, tmp_path: Path) -> None:
    told, goes_on = run(device, tmp_path)
    done = told[-1]
    assert isinstance(done, Done) and goes_on
    steps = [(one.phase, one.step, one.steps) for one in told if isinstance(one, Now)]
    expected = [
        ("text", 0, None),
        ("steps", 0, None),
        *(("steps", n, 3) for n in (1, 2, 3)),
        ("decode", 3, 3),
        ("encode", 3, 3),
    ]
    assert [step for step in steps if step[0] != "loading"] == expected
    assert list(done.seconds) == ["text", "steps", "decode", "encode"]
    assert (done.steps, done.warnings, done.resolved) == (3, ["cut"], {"seed": 1})
    assert {file.name for file in tmp_path.iterdir()} == {"video.thumbnail.webp", "video.last.png"}
    assert all(of_worker(line(one)[:-1]) == one for one in told)
    assert to_worker(line(Cancel("1"))) == Cancel("1")


def test_a_job_is_cancelled(device: Device, tmp_path: Path) -> None:
    assert run(device, tmp_path, cancelled=True) == ([Cancelled("1")], True)
    assert device.loads == []

    told: list[OfWorker] = []
    worker = Worker(told.append, pipelines(device, tmp_path))
    worker.take(Run("1", "a", {"prompt": "p"}, str(tmp_path), "mp4"))
    device.happens = lambda: worker.take(Cancel("1"))  # while it loads
    assert worker.run(worker.jobs.get())
    assert told[-1] == Cancelled("1") and not [one for one in told if isinstance(one, Done)]


def test_failures(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A video that takes the memory ends the worker, so that the next one has all of it; others do not."""
    device.free = 0
    told, goes_on = run(device, tmp_path)
    assert not goes_on
    assert told[-1] == Failed("1", "out_of_memory", told[-1].message, True)  # type: ignore[union-attr]
    assert "too little memory" in told[-1].message  # type: ignore[union-attr]
    device.free = 25

    def fails() -> None:
        raise ValueError("a secret in /srv/x")

    device.happens = fails
    told, goes_on = run(device, tmp_path)
    assert goes_on and isinstance(told[-1], Failed)
    assert told[-1].message == "internal error: ValueError; see the server's log"
    assert "a secret in /srv/x" in capsys.readouterr().err
    assert failure("1", ArtifactError("damaged")).code == "artifact_error"
    full = OSError(errno.ENOSPC, "No space left on device", "/srv/x.mp4")
    for error in (full, NoSpaceError("there is no space left to write /srv/x.mp4; choose another --output")):
        told = failure("1", error)
        assert (told.code, told.message) == ("no_space", NO_ROOM)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (FULL, True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (OSError(2, "No such file"), False),
    ],
)
def test_want_of_memory(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) == lacks


def test_progress_is_told_from_any_thread() -> None:
    """Parts are loaded by threads of their own."""
    told: list[OfWorker] = []
    progress = Progress("1", told.append)
    with progress.timings.phase("restore", "transformer"):
        threads = [
            threading.Thread(target=lambda: progress.timings.add("transfer", 0.0, 1.0)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with progress.timings.phase("denoise"):
            pass
    phases = [one.phase for one in told if isinstance(one, Now)]
    assert list(dict.fromkeys(phases)) == ["loading", "steps"] and phases[-1] == "loading"
