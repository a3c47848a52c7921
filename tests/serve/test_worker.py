"""The process with the device: what it tells and holds, how its videos fail, and where it is started."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wanrun
from helpers.house import make
from helpers.manifests import full_manifest, plain_manifest, with_model
from helpers.options import generation
from wanrun import Event, Outcome
from wanrun.errors import ArtifactError, CancelledError, NoSpaceError, UsageError
from wanserve.environments import environments
from wanserve.messages import (
    NO_ROOM,
    Cancel,
    ChangedError,
    InternalError,
    Look,
    Make,
    OfWorker,
    OutOfMemoryError,
    Preview,
    code_of,
    line,
    of_worker,
    to_worker,
)
from wanserve.pipelines import Pipelines, lacks_memory
from wanserve.process import how
from wanserve.worker import OUT_OF_MEMORY, Worker, told

FULL = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")


class Device:
    """Loads artifacts that take memory, and closes them."""

    def __init__(self, memory: int) -> None:
        self.free, self.closed, self.loads = memory, list[str](), list[str]()
        self.happens: Callable[[], object] = lambda: None
        self.decodes: Callable[[], object] = lambda: None
        self.preview: Callable[[], np.ndarray] = lambda: (
            np.array([0, 255], np.uint8).repeat(48).reshape(2, 4, 4, 3)
        )

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

        return SimpleNamespace(manifest=generation().manifest, close=close, run=self.run)

    def run(self, generation: Any, on_step: Any, timings: Any, cancel: Any, **given: Any) -> Any:
        with timings.phase("text"):
            pass
        with timings.phase("denoise"):
            for step in range(1, 4):
                self.happens()
                on_step(step, 3, SimpleNamespace(preview=self.preview, tiny=None))
                cancel.check()
            timings.steps("step", 3, 0.3)
        with timings.phase("decode"):
            self.decodes()
            frames = np.zeros((1, 2, 4, 4, 3), np.uint8)
        return wanrun.Result(frames, np.zeros(1), {"seed": 1, "fps": 16}, timings, ("cut",))


@pytest.fixture
def device() -> Device:
    return Device(25)


def pipelines(device: Device, folder: Path) -> Pipelines:
    for name in "abc":
        (folder / name).mkdir(exist_ok=True)
        plain_manifest().write(folder / name)
    artifacts = {name: (str(folder / name), "", plain_manifest().content_digest) for name in "abc"}
    return Pipelines(artifacts, {}, device.load, lambda: None)


@pytest.mark.thorough
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


@pytest.mark.slow
def test_room_is_made_before_where_it_is_known(device: Device, toy_artifact: Path) -> None:
    """By the bytes of the weights in the manifest."""
    manifest = wanrun.open_artifact(toy_artifact).manifest
    artifacts = {name: (str(toy_artifact), "", manifest.content_digest) for name in "ab"}
    size = sum(one.nbytes for one in manifest.components.values())
    for free, closed in ((2 * size, 0), (size, 1)):
        device.closed.clear()
        held = Pipelines(artifacts, {}, device.load, lambda free=free: free)
        held.get("a")
        held.get("b")
        assert len(device.closed) == closed
        device.free = 25


def test_an_artifact_that_is_changed_while_it_is_served(device: Device, tmp_path: Path) -> None:
    """It is not loaded: the jobs that wait were resolved for the other one."""
    held = pipelines(device, tmp_path)
    with_model(plain_manifest(), variant="another").write(tmp_path / "a")
    with pytest.raises(ChangedError):
        held.get("a")
    assert device.loads == [] and held.get("b") is held.get("b")


def run(device: Device, folder: Path, cancel: bool = False) -> tuple[list[OfWorker], Outcome, bool]:
    """What a worker tells of a job, how the job ended, and whether the worker can go on."""
    said: list[OfWorker] = []
    worker = Worker(said.append, pipelines(device, folder))
    worker.take(make("1", "a", folder))
    if cancel:
        worker.take(Cancel("1"))
    worker.take(Cancel("another"))
    worker.run(next_job(worker), lambda: None)
    assert isinstance(said[-1], Outcome)
    return said, said[-1], worker.jobs.empty()


def next_job(worker: Worker) -> Make:
    job = worker.jobs.get()
    assert job is not None
    return job


def test_a_job_is_told_step_by_step(device: Device, tmp_path: Path) -> None:
    said, outcome, goes_on = run(device, tmp_path)
    assert outcome.error is None and goes_on
    phases = [one.phase for one in said if isinstance(one, Event)]
    assert list(dict.fromkeys(phases)) == ["text", "steps", "decode", "encode"]
    assert (outcome.steps, outcome.warnings, outcome.metadata) == (3, ["cut"], {"seed": 1, "fps": 16})
    assert {Path(path).name for path in outcome.sizes} == {
        "video.npy",
        "video.thumbnail.webp",
        "video.last.png",
    }
    assert all(of_worker(line(one)[:-1]) == one for one in said)
    for message in (Cancel("1"), Look("1"), make("1", "a", tmp_path)):
        assert to_worker(line(message)) == message


def test_previews_are_made_while_somebody_looks(device: Device, tmp_path: Path) -> None:
    """Not before, one in a while, and none of an artifact without a map; a video does not fail for it."""
    said = list[OfWorker]()
    worker = Worker(said.append, pipelines(device, tmp_path))
    worker.take(Look("another"))
    for id, looks_at in (("1", "1"), ("2", "another")):
        worker.take(make(id, "a", tmp_path))
        device.happens = partial(worker.take, Look(looks_at))
        worker.run(next_job(worker), lambda: None)
    (preview,) = [one for one in said if isinstance(one, Preview)]
    assert (preview.id, preview.step) == ("1", 1) and of_worker(line(preview)[:-1]) == preview
    with Image.open(io.BytesIO(preview.image)) as image:
        assert (image.format, image.size, image.n_frames) == ("WEBP", (4, 4), 2)  # type: ignore[attr-defined]


def test_a_job_is_cancelled(device: Device, tmp_path: Path) -> None:
    said, outcome, goes_on = run(device, tmp_path, cancel=True)
    assert isinstance(outcome.error, CancelledError) and goes_on
    assert len(said) == 1 and device.loads == []

    said = []
    worker = Worker(said.append, pipelines(device, tmp_path))
    worker.take(make("1", "a", tmp_path))
    device.happens = lambda: worker.take(Cancel("1"))  # while it loads
    worker.run(next_job(worker), lambda: None)
    assert (
        worker.jobs.empty() and isinstance(said[-1], Outcome) and isinstance(said[-1].error, CancelledError)
    )


def test_failures(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that takes the memory ends the worker, so that the next one has all of it; others do not."""
    device.free = 0
    _, outcome, goes_on = run(device, tmp_path)
    assert not goes_on and isinstance(outcome.error, OutOfMemoryError)
    device.free = 25

    def fails() -> None:
        raise ValueError("a secret in /srv/x")

    device.happens = fails
    _, outcome, goes_on = run(device, tmp_path)
    assert goes_on and isinstance(outcome.error, InternalError)
    assert "ValueError" in str(outcome.error) and "secret" not in str(outcome.error)
    assert "/srv/x" in capsys.readouterr().err


def test_a_job_begins_behind_the_steps_of_another(device: Device, tmp_path: Path) -> None:
    """And ends, although the other one takes the memory; then the worker leaves."""
    said, steps, both = list[OfWorker](), itertools.count(1), threading.Event()
    worker = Worker(said.append, pipelines(device, tmp_path))

    def happens() -> None:
        if next(steps) > 4:  # a load, and three steps
            both.set()

    def decodes() -> None:
        device.decodes = lambda: None
        assert both.wait(10)
        raise FULL

    device.happens, device.decodes = happens, decodes
    for id in "12":
        worker.take(make(id, "a", tmp_path))
    assert worker.serve() == OUT_OF_MEMORY
    outcomes = {one.id: one.error for one in said if isinstance(one, Outcome)}
    assert isinstance(outcomes["1"], OutOfMemoryError) and outcomes["2"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArtifactError("damaged", "damaged"), "damaged"),
        (UsageError("out_of_range", "too long"), "out_of_range"),
        (OSError(errno.ENOSPC, "No space left on device", "/srv/x.mp4"), "no_space"),
        (NoSpaceError("no_space", "there is no space left to write /srv/x.mp4"), "no_space"),
        (MemoryError(), "out_of_memory"),
        (ArtifactError("wrong_machine", "RESOURCE_EXHAUSTED: Out of memory"), "out_of_memory"),
        (ValueError("a bug"), "internal_error"),
    ],
)
def test_the_codes_of_the_api(error: Exception, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what a client has sent, and of a full disk, the log has the server's line; of others a traceback."""
    found, message = code_of(told(error))
    assert found == code and (message == NO_ROOM) == (code == "no_space")
    plain = isinstance(error, UsageError | OSError)
    assert (capsys.readouterr().err == "") == plain


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (FULL, True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (OSError(2, "No such file"), False),
    ],
)
def test_want_of_memory(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) == lacks


def test_a_worker_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a CPU and for a mesh; on accelerators each sees its own alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain, mesh = [plain_manifest()], [full_manifest()]
    assert environments(plain, None, tmp_path) == [{}]
    assert environments(plain, 2, tmp_path) == [{}, {}]
    for number in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    assert environments(plain, None, tmp_path) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert environments(mesh, None, tmp_path) == [{}]
    assert environments(plain, 1, tmp_path) == [{}]
    assert len(environments(plain, 3, tmp_path)) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, GPU-bb")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments(plain, None, tmp_path)] == [
        "GPU-aa",
        "GPU-bb",
    ]
    other = tmp_path / "tpu"
    for name in ("vfio/0", "vfio/1", "vfio/vfio"):
        (other / "dev" / name).mkdir(parents=True)
    assert [one["TPU_VISIBLE_CHIPS"] for one in environments(plain, None, other)] == ["0", "1"]


def test_how_a_worker_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGKILL)
    assert how(process.wait()).startswith("signal 9 (Killed, ")
    assert how(-signal.SIGSEGV).startswith("signal 11 (")
    assert how(3) == "exit code 3"
