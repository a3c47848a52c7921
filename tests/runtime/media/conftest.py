"""Fixtures shared by the tests of media."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from helpers.started import Started


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
