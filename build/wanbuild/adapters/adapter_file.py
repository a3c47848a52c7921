"""Writes an adapter's safetensors file, with one layer of a tensor in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from wanbuild.adapters.tensors import PlannedTensor
from wanbuild.source.safetensors import DTYPES
from wanrun.artifact.adapter import ADAPTER_METADATA, AdapterContent
from wanrun.files import canonical_json, write_durable

_ALIGNED = 64
"""The data begins at a multiple of so many bytes."""


def write_adapter(path: Path, tensors: Sequence[PlannedTensor], content: AdapterContent) -> tuple[str, int]:
    """Writes an adapter's file durably; returns the sha256 of its bytes, hexadecimal, and their number.

    The caller renames it. Raises SourceError if a value overflows.
    """
    ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.name))
    digest, size = hashlib.sha256(), 0

    def counted() -> Iterator[memoryview | bytes]:
        nonlocal size
        for data in _parts(ordered, content):
            digest.update(data)
            size += len(data)
            yield data

    write_durable(path, counted())
    return digest.hexdigest(), size


def _parts(tensors: Sequence[PlannedTensor], content: AdapterContent) -> Iterator[memoryview | bytes]:
    """Yields the bytes of a file, in parts."""
    names, end = {dtype: name for name, dtype in DTYPES.items()}, 0
    record = canonical_json(msgspec.to_builtins(content)).decode()
    header: dict[str, object] = {"__metadata__": {ADAPTER_METADATA: record}}
    for one in tensors:
        begin, end = end, end + one.nbytes
        header[one.name] = {
            "dtype": names[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNED)
    yield len(raw).to_bytes(8, "little") + raw
    for one in tensors:
        for row in one.rows():
            yield np.ascontiguousarray(row).reshape(-1).view(np.uint8).data
