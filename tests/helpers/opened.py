"""An opened artifact without a pipeline, and what a test has to know of its memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from helpers.damage import PROFILE
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.layout import CRC_BYTES, ArrayLayout
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.parameters import Component, Parameter
from wanrun.artifact.select import select_target
from wanrun.files import sha256_of
from wanrun.opened.device import open_device
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.opened.policy import LoadPolicy
from wanrun.timing.timings import Recorder, Timings
from wanrun.weights.bound_programs import Programs
from wanrun.weights.readahead import ReadAhead
from wanrun.weights.store import WeightStore

ROWS, ROW_BYTES = 24, 2 * 2**20
"""Of the component 'big': one chunk file a row, 48 MiB in all."""

LIMIT_SECONDS = 20.0
"""For what takes milliseconds unless something blocks for good."""


class Opened:
    """An artifact that is opened for its first profile.

    Attributes:
        opened: the record of it.
        timings: where loading is recorded.
        weights: its weights.
        executables: its executables.
    """

    def __init__(self, artifact: Path, ahead: ReadAhead | None = None) -> None:
        manifest, self.timings = read_manifest(artifact), Timings()
        profile = manifest.profiles[PROFILE]
        selected = select_target(Artifact(manifest, artifact), profile)
        device = open_device(selected, False, self.timings, print)
        recorder, self._recording = Recorder(), ExitStack()
        self._recording.enter_context(recorder.into(self.timings))
        self.opened = OpenedArtifact(
            Artifact(manifest, artifact), selected, device, LoadPolicy(), recorder, print, print
        )
        self.weights = WeightStore(self.opened, ahead)
        self.executables = self.weights.executables

    def programs(self, profile: str = PROFILE) -> Programs:
        """The programs of a profile, bound to these weights."""
        return Programs(self.opened.manifest.profiles[profile], self.weights)

    def close(self) -> None:
        self._recording.close()
        self.weights.close()


class Watch:
    """What the stores of a test did: components read, transfers, and the blocks they read into."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.moved = 0
        self.blocks: list[weakref.ref[Any]] = []

    def freed(self) -> bool:
        """Whether every block is gone, maybe a moment from now: a thread lets go of its part when it ends.

        Without a garbage collection: one that is needed would come by chance.
        """
        return eventually(lambda: all(block() is None for block in self.blocks))


def eventually(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Whether something becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def settled(store: WeightStore, name: str) -> Any:
    """A component's weights, when the threads that brought them have let go of their part."""
    (reading,) = store.prefetch([name])
    copy = weakref.ref(reading)
    del reading
    weights = store.weights(name)
    assert eventually(lambda: copy() is None)
    assert eventually(lambda: all(thread.name != "touch" for thread in threading.enumerate()))
    return weights


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
