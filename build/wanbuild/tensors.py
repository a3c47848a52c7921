"""Reads one safetensors file through a memory mapping, and refuses a file that is not exactly right.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length as an unsigned
little-endian integer; the header, a JSON object of name -> {dtype, shape, data_offsets}; then the data.
This reader exists beside the safetensors package because conversion reads from several threads and gives
pages back as it goes, which needs the mapping itself; it accepts no file that the package refuses.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from wanbuild.config import unique_object
from wanrun.errors import SourceError

MAX_HEADER_BYTES = 100_000_000
PICKLED_SUFFIXES = frozenset({".bin", ".pth", ".pt", ".ckpt", ".pkl"})

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F16": np.dtype("<f2"),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)
"""Every whole-byte dtype name of the format."""

WEIGHT_DTYPES = frozenset({"F32", "F16", "BF16"})
"""The ones a weight may have: Wan is published in these, and a quantized weight would need its scales."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Args:
        dtype: its NumPy dtype (ml_dtypes for bfloat16).
        shape: its shape.
        offset: its first byte, counted from the start of the file.
        nbytes: its size in bytes.
        dtype_name: its dtype as the file spells it.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    dtype_name: str


def refuse_pickle(path: Path) -> None:
    """Raises SourceError if the file's name is that of a pickled checkpoint, which runs code when loaded."""
    if path.suffix in PICKLED_SUFFIXES:
        raise SourceError(
            f"{path} is a pickled checkpoint, which is never loaded",
            expected="a .safetensors file",
            remedy="convert it to safetensors on a machine you trust, or download the safetensors files",
        )


class TensorFile:
    """One safetensors file, mapped read-only. Safe to read from several threads; a context manager.

    Args:
        path: the file.

    Raises:
        SourceError: if the file is missing, cannot be read, is pickled, or breaks the format: a cut-off
            file, a wrong header, entries that overlap, leave holes or do not fill the file exactly.
    """

    def __init__(self, path: Path) -> None:
        refuse_pickle(path)
        self.path = path
        try:
            with path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                if self.nbytes < 8:
                    raise self._cut_off("at least 8 bytes")
                self._mapping: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise SourceError(
                f"{path} is missing", remedy="download it again; check the folder is complete"
            ) from None
        except OSError as error:
            raise SourceError(
                f"{path} cannot be read: {error.strerror}", remedy="check that it is a readable file"
            ) from None
        self.metadata: Mapping[str, str]
        self.entries: Mapping[str, TensorEntry]
        self.metadata, self.entries = self._read_header(self._mapping)

    def _cut_off(self, expected: str) -> SourceError:
        return SourceError(
            f"{self.path} is cut off", expected=expected, found=f"{self.nbytes}", remedy="download it again"
        )

    def _damaged(self, what: str, expected: object = None, found: object = None) -> SourceError:
        return SourceError(
            f"{self.path} is not a valid safetensors file: {what}",
            expected=expected,
            found=found,
            remedy="download it again",
        )

    def _read_header(self, mapping: mmap.mmap) -> tuple[Mapping[str, str], Mapping[str, TensorEntry]]:
        length = int.from_bytes(mapping[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise self._damaged("header length", f"at most {MAX_HEADER_BYTES} bytes", length)
        data_start = 8 + length
        if data_start > self.nbytes:
            raise self._cut_off(f"a header of {length} bytes")
        raw = mapping[8:data_start]
        if raw[:1] != b"{":
            raise self._damaged("header", "a JSON object", repr(raw[:16]))
        try:
            header = json.loads(
                raw.decode("utf-8"), object_pairs_hook=unique_object, parse_constant=_refuse_constant
            )
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"header: {error}") from None
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._damaged("__metadata__", "strings", repr(metadata)[:80])
        entries = {name: self._entry(name, value, data_start) for name, value in header.items()}
        self._check_cover(entries, data_start)
        return MappingProxyType(metadata), MappingProxyType(entries)

    def _entry(self, name: str, value: Any, data_start: int) -> TensorEntry:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"entry {name!r}", "dtype, shape and data_offsets", repr(value)[:80])
        dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise self._damaged(f"dtype of {name!r}", "one of " + ", ".join(DTYPES), repr(dtype_name)[:80])
        if not _is_sizes(shape):
            raise self._damaged(f"shape of {name!r}", "sizes", repr(shape)[:80])
        if not (_is_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
            raise self._damaged(f"data_offsets of {name!r}", "[begin, end]", repr(offsets)[:80])
        dtype, nbytes = DTYPES[dtype_name], offsets[1] - offsets[0]
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise self._damaged(
                f"length of {name!r}", f"{math.prod(shape) * dtype.itemsize} bytes", f"{nbytes} bytes"
            )
        return TensorEntry(dtype, tuple(shape), data_start + offsets[0], nbytes, dtype_name)

    def _check_cover(self, entries: Mapping[str, TensorEntry], data_start: int) -> None:
        """Raises unless the entries lie end to end from the data's start to the file's end."""
        end = data_start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != end:
                kind = "overlaps the one before" if entry.offset < end else "leaves a hole before it"
                raise self._damaged(f"{name!r} {kind}", f"offset {end}", entry.offset)
            end = entry.offset + entry.nbytes
        if end > self.nbytes:
            raise self._cut_off(f"{end} bytes")
        if end < self.nbytes:
            raise self._damaged("bytes after the last tensor", f"{end} bytes", self.nbytes)

    def _locate(self, name: str) -> tuple[mmap.mmap, TensorEntry]:
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        return self._mapping, self.entries[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapping; it may be unaligned, and stays valid after close().

        Raises:
            KeyError: if the file has no such tensor.
            SourceError: if its dtype is none that a weight may have.
        """
        mapping, entry = self._locate(name)
        if entry.dtype_name not in WEIGHT_DTYPES:
            raise SourceError(
                f"{name} in {self.path} is not a plain weight",
                expected=" or ".join(sorted(WEIGHT_DTYPES)),
                found=entry.dtype_name,
                remedy="use the published checkpoint, not a quantized one",
            )
        count = math.prod(entry.shape)
        if count == 0:  # np.frombuffer refuses an empty range
            return np.empty(entry.shape, entry.dtype)
        return np.frombuffer(mapping, entry.dtype, count, entry.offset).reshape(entry.shape)

    def drop(self, name: str) -> None:
        """Gives the tensor's pages back, so that reading a large file does not grow resident memory.

        Reading the tensor again, or a neighbour that shares a page, faults the page in again.
        """
        mapping, entry = self._locate(name)
        start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, entry.offset + entry.nbytes - start)

    def close(self) -> None:
        """Lets go of the mapping; the memory is unmapped once no array refers to it."""
        self._mapping = None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
