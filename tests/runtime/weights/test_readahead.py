"""What is read before the device is open is not read again, and what nobody takes is let go of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers.opened import Opened, Watch
from wanrun.artifact.manifest import read_manifest
from wanrun.opened.policy import LoadPolicy
from wanrun.weights.readahead import ReadAhead

pytestmark = pytest.mark.slow


@pytest.fixture
def ahead(shared: Path) -> ReadAhead:
    made = ReadAhead(shared, LoadPolicy())
    made.touch("big", read_manifest(shared).components["big"])
    return made


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


def test_what_nobody_takes_is_let_go_of(ahead: ReadAhead) -> None:
    ahead.read("tpu")
    (restore,) = ahead._restores.values()
    ahead.stop()
    assert ahead.restore("big") is ahead.memory("big") is None
    with pytest.raises(CancelledError):
        restore.result()
