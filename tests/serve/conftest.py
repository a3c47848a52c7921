"""A manifest that is served without an artifact, and a server of the toy artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_client import Server, served


@pytest.fixture(scope="session")
def server(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the toy artifact, as the models toy and other. Its tests leave no waiting jobs."""
    data = tmp_path_factory.mktemp("served")
    with served(data, f"toy={toy_artifact}", f"other={toy_artifact}", "--timeout", 2) as running:
        yield running
