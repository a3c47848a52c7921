"""An object store in this process."""

from __future__ import annotations

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry


class Bucket(MemoryFileSystem):
    """fsspec's store in memory, by URLs of S3."""

    protocol = "s3"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("s3://", "memory://", 1)))


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to s3:// stays here."""
    monkeypatch.setitem(_registry, "s3", Bucket)
