"""Fixtures of the tests that have torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers import torch_threads


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch runs on one thread."""
    with torch_threads.one_thread():
        yield
