"""A server of the toy artifact, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_client import Server, served


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine; one that hangs fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 30))
    return True


@pytest.fixture(scope="session")
def server(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the toy artifact, as the models toy and other. Its tests leave no waiting jobs."""
    data = tmp_path_factory.mktemp("served")
    with served(data, f"toy={toy_artifact}", f"other={toy_artifact}", "--timeout", 2) as running:
        yield running
