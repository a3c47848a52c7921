"""Fixtures shared by the tests of the runtime."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.started import Started
from wanrun.weights.restore import Restore


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The components that are read, in order."""
    read: list[str] = []
    begin = Restore.__init__

    def record(self: Restore, artifact: Path, name: str, *arguments: Any, **options: Any) -> None:
        read.append(name)
        begin(self, artifact, name, *arguments, **options)

    monkeypatch.setattr(Restore, "__init__", record)
    return read


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Watches the processes that a test starts."""
    processes, begin = Started(), subprocess.Popen.__init__

    def record(self: subprocess.Popen[bytes], *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        processes.append(self)
        processes.then(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    return processes
