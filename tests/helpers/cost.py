"""Measures what each test costs: CPU seconds of its process and of the processes that it waited for.

What several tests share is told apart from the test that happens to need it first: what is imported,
fixtures of a module or of the session, and the folders of ``helpers.artifacts.shared``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from helpers.tiers import Times, function

SURPRISING_SECONDS = 20.0
"""What a test of a recorded file may take that nothing is recorded of itself, on any machine."""

SURPRISING_TIMES = 10.0
"""How many times what was recorded a test may take: a slow or busy machine with empty caches stays below."""


def cpu_seconds() -> float:
    """CPU seconds so far, of user and system, of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


_COST: ContextVar[Cost | None] = ContextVar("cost", default=None)


def part(name: str) -> AbstractContextManager[None]:
    """Charges what happens in it to a name, as if it were a fixture, and not to the test around it."""
    cost = _COST.get()
    return nullcontext() if cost is None else cost.part(name)


class Cost:
    """A plug-in that measures, and fails a test that takes far more than was recorded of it.

    Args:
        times: what was recorded.
        file: gets a line of JSON for each test as it ends: CPU seconds of the test, of what is ``shared`` by
            name, and of its process so far. None if nothing is recorded now.
    """

    def __init__(self, times: Times, file: Path | None) -> None:
        self._times, self._file = times, file
        self._inner = [0.0]
        self._shared: Counter[str] = Counter()
        self._began = cpu_seconds()
        _COST.set(self)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charges what happens in it to a name, and not to the test or the part around it."""
        began = cpu_seconds()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = cpu_seconds() - began
            self._shared[name] += spent - self._inner.pop()
            self._inner[-1] += spent

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        with self.part(f"{fixturedef.baseid}::{fixturedef.argname}"):
            return (yield)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if self._file is None:
            return
        for name in ("jax", "flax.nnx") if session.config.getoption("--without-torch") else _IMPORTED:
            with self.part(f"import {name}"):
                importlib.import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with self.part("collecting"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        item.stash[_BEGAN] = cpu_seconds()
        self._inner[-1] = 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        try:
            return (yield)
        finally:
            seconds = cpu_seconds() - item.stash[_BEGAN] - self._inner[-1]
            self._check(item, seconds)
            shared = {name: round(spent, 3) for name, spent in self._shared.items()}
            cost = {"seconds": round(seconds, 3), "shared": shared, "process": os.getpid()}
            item.user_properties.append(("cost", cost | {"so_far": round(cpu_seconds() - self._began, 1)}))
            self._shared.clear()

    def _check(self, item: pytest.Item, seconds: float) -> None:
        file, name = function(item.nodeid)
        recorded = self._times.of(file, name)
        known = self._file is None and file in self._times.tests
        if known and seconds > max(SURPRISING_SECONDS, SURPRISING_TIMES * recorded):
            pytest.fail(
                f"takes {seconds:.1f} CPU s, and {recorded:.1f} are recorded: run its file with "
                "--record-times FILE, then `python tests/helpers/tiers.py FILE`"
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is not None and report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
            with self._file.open("a") as lines:
                print(json.dumps({"test": report.nodeid, **dict(report.user_properties)["cost"]}), file=lines)


_IMPORTED = ("jax", "flax.nnx", "torch", "transformers", "diffusers")
_BEGAN = pytest.StashKey[float]()
