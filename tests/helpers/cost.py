"""Measures what each test costs: CPU seconds of its process and of the processes that it waited for.

What several tests share is told apart from the test that happens to need it first: what is imported,
fixtures of a module or of the session, and the folders of ``helpers.artifacts.shared``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from helpers.tiers import tier

SURPRISING_SECONDS: Mapping[str, float] = {"fast": 20.0, "test": 60.0}
"""What a case of a tier may take on a slow or busy machine with empty caches."""


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
    """A plug-in that measures, and fails a test that takes far more than its mark says.

    Args:
        file: gets a line of JSON for each test as it ends: its tier and shared fixtures, CPU seconds of the
            test, of what is ``shared`` by name, and of its process so far. None if nothing is recorded now.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._inner = [0.0]
        self._shared: defaultdict[str, float] = defaultdict(float)
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
            cost = {
                "tier": tier(item),
                "seconds": round(seconds, 3),
                "shared": {name: round(spent, 3) for name, spent in self._shared.items()},
                "fixtures": sorted(_shared_fixtures(item)),
                "process": os.getpid(),
                "so_far": round(cpu_seconds() - self._began, 1),
            }
            item.user_properties.append(("cost", cost))
            self._shared.clear()

    def _check(self, item: pytest.Item, seconds: float) -> None:
        limit = SURPRISING_SECONDS.get(tier(item))
        if self._file is None and limit is not None and seconds > limit:
            pytest.fail(f"takes {seconds:.1f} CPU s: make it cheaper, or mark it slow or thorough")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is not None and report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
            with self._file.open("a") as lines:
                costs: dict[str, Any] = dict(report.user_properties)  # type: ignore[arg-type]
                print(json.dumps({"test": report.nodeid, **costs["cost"]}), file=lines)


def _shared_fixtures(item: Any) -> Iterator[str]:
    """The fixtures of a module or of the session that a test has, in any way."""
    for *_, fixture in item._fixtureinfo.name2fixturedefs.values():
        if fixture.scope != "function":
            yield f"{fixture.baseid}::{fixture.argname}"


_IMPORTED = ("jax", "flax.nnx", "torch", "transformers", "diffusers")
_BEGAN = pytest.StashKey[float]()
