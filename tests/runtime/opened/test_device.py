"""The device that a target's executables run on: what differs is told, or compiled around with a warning."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from wanrun.artifact.select import SelectedTarget
from wanrun.errors import ArtifactError, Mismatch
from wanrun.opened import device as device_module
from wanrun.opened.device import open_device
from wanrun.timing.timings import Timings

CPU = Mismatch("the CPU", "a", "b", "use another machine")
KIND = Mismatch("the device kind", "v5e", "v6e", "build for it")
TARGET = cast(Any, SimpleNamespace(environment={"platform": "cpu"}))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens the device of a target; returns what came of it, the warnings and the phases."""

    def call(host: Sequence[Mismatch] = (), device: Sequence[Mismatch] = (), allow: bool = False) -> Any:
        monkeypatch.setattr(device_module, "device_mismatches", lambda *facts: list(device))
        warnings: list[str] = []
        timings = Timings()
        selected = SelectedTarget("local", TARGET, tuple(host))
        return open_device(selected, allow, timings, warnings.append), warnings, timings

    return call


def test_a_device_that_fits(opened: Any) -> None:
    found, warnings, timings = opened()
    assert (found.device, found.foreign) == (jax.devices("cpu")[0], False)
    assert warnings == []
    phases = {(span.phase, span.label) for span in timings.labelled_spans}
    assert phases >= {("import", "jax"), ("device", None)}


def test_another_device_is_refused_with_every_fact(opened: Any) -> None:
    message = r"target local was not built for this machine: the device kind: .*the CPU"
    with pytest.raises(ArtifactError, match=message):
        opened(device=[KIND, CPU])


@pytest.mark.parametrize(("host", "device"), [([CPU], []), ([], [KIND]), ([CPU], [KIND])])
def test_what_differs_may_be_compiled_around(
    opened: Any, host: list[Mismatch], device: list[Mismatch]
) -> None:
    found, (warning,), _ = opened(host, device, allow=True)
    assert found.foreign
    assert warning.endswith(": " + "; ".join(map(str, [*host, *device]))) and "compiled here" in warning


def test_nothing_that_differs_is_no_warning(opened: Any) -> None:
    found, warnings, _ = opened(allow=True)
    assert not found.foreign and warnings == []
