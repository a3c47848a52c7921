"""Reads a safetensors file by position, and refuses any file that breaks the format.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length as an unsigned
little-endian integer; the header, a JSON object of name -> {dtype, shape, data_offsets}; then the data.
The safetensors package is not used because conversion reads blocks from several threads into buffers that
stay in cache. A memory mapping costs a page fault for every page, grows resident memory, and ends the process
if the file is cut off meanwhile. This reader accepts no file that the package refuses.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from wanbuild.config import shown, unique_object
from wanrun.errors import SourceError
from wanrun.files import open_regular

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 32
MAX_TEXT_BYTES = 4096
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
"""The dtypes of plain weights: Wan is published in these."""

EIGHT_BIT_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
"""The dtypes of 8-bit weights, which have scales or may have them (``wanbuild.source.scales``)."""

GGUF = b"GGUF"
"""The first bytes of a GGUF file."""

READABLE_DTYPES = WEIGHT_DTYPES | EIGHT_BIT_DTYPES
"""The dtypes that conversion reads."""


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in its file.

    Attributes:
        dtype: its NumPy dtype (ml_dtypes for bfloat16).
        offset: position of its first byte in the file.
        nbytes: its size in bytes.
        dtype_name: its dtype as the file spells it.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    dtype_name: str


def first_bytes(path: Path) -> bytes:
    """Returns the first bytes of a regular file; empty for anything else."""
    try:
        with open_regular(path) as file:
            return file.read(8)
    except OSError:
        return b""


def refuse_pickle(path: Path) -> None:
    """Raises SourceError if the file has the name of a pickled checkpoint, which runs code when loaded."""
    if path.suffix in PICKLED_SUFFIXES:
        raise pickled(path)


def pickled(path: Path) -> SourceError:
    """Returns the error of a pickled checkpoint."""
    return SourceError(
        "untrusted",
        f"{path} is a pickled checkpoint, which is never loaded",
        expected="a .safetensors file",
        remedy="convert it to safetensors on a machine you trust, or download the safetensors files",
    )


def gguf(path: Path) -> SourceError:
    """Returns the error of a GGUF file."""
    return SourceError(
        "wrong_kind",
        f"{path} is a GGUF file, whose weights are quantized",
        expected="a .safetensors file",
        remedy="take that of the same model, or a checkpoint in the diffusers layout, such as "
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )


def nothing_there(path: Path, kind: str = "file", remedy: str = "check the path") -> SourceError:
    """Returns the error of a path that does not exist, with similar names in its folder."""
    try:
        near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()])
    except OSError:
        without = f"no folder {path.parent}" if kind == "file" else None  # else it may be a hub id
        return SourceError("missing_file", f"there is no {kind} {path}", found=without, remedy=remedy)
    found = ", ".join(str(path.with_name(name)) for name in near) or None
    return SourceError("missing_file", f"there is no {kind} {path}", found=found, remedy=remedy)


def not_a_weight(name: str, path: Path, entry: TensorEntry) -> SourceError:
    """Returns the error of a tensor whose dtype is not a weight's."""
    return SourceError(
        "wrong_kind",
        f"{name} in {path} is not a plain weight",
        expected=" or ".join(sorted(WEIGHT_DTYPES)),
        found=entry.dtype_name,
        remedy="use the published checkpoint, not a quantized one",
    )


class TensorFile:
    """One safetensors file, open for reading; thread-safe, and a context manager.

    ``absent`` returns the error of a file that is not there. The constructor raises SourceError if the file
    is missing, unreadable or pickled, or breaks the format: the file is cut off, the header is wrong, or
    entries overlap, leave gaps or do not fill the file exactly.
    """

    kind: ClassVar[str] = "safetensors"

    def __init__(self, path: Path, absent: Callable[[Path], SourceError] = nothing_there) -> None:
        refuse_pickle(path)
        self.path = path
        self._descriptor: int | None = None
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer; regular files ignore the flag.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._descriptor)
            self.nbytes = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise SourceError("wrong_kind", f"{path} is not a file", remedy="give a .safetensors file")
            if self.nbytes < 8:
                raise self._cut_off("at least 8 bytes")
            self.metadata: Mapping[str, str]
            self.entries: Mapping[str, TensorEntry]
            self.metadata, self.entries = self._read_header()
        except FileNotFoundError:
            raise absent(path) from None
        except OSError as error:
            self.close()
            raise self._unreadable(error) from None
        except SourceError:
            self.close()
            raise

    def _unreadable(self, error: OSError) -> SourceError:
        return SourceError(
            "unreadable",
            f"{self.path} cannot be read: {error.strerror}",
            remedy="check that it is a readable file",
        )

    def _cut_off(self, expected: str) -> SourceError:
        return SourceError(
            "damaged",
            f"{self.path} is cut off",
            expected=expected,
            found=f"{self.nbytes}",
            remedy="download it again",
        )

    def damaged(self, what: str, expected: object = None, found: object = None) -> SourceError:
        """Returns the error of a file that breaks its format."""
        return SourceError(
            "unreadable",
            f"{self.path} is not a valid {self.kind} file: {what}",
            expected=expected,
            found=found,
            remedy="download it again",
        )

    def _read_header(self) -> tuple[Mapping[str, str], Mapping[str, TensorEntry]]:
        start = self._bytes(0, 8)
        if start.startswith(GGUF):
            raise gguf(self.path)
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise self.damaged("header length", f"at most {MAX_HEADER_BYTES} bytes", length)
        data_start = 8 + length
        if data_start > self.nbytes:
            raise self._cut_off(f"a header of {length} bytes")
        raw = self._bytes(8, length)
        if raw[:1] != b"{":
            raise self.damaged("header", "a JSON object", repr(raw[:16]))
        try:
            header = json.loads(
                raw.decode("utf-8"),
                object_pairs_hook=unique_object,
                parse_constant=_refuse_constant,
                parse_int=_parse_int,
            )
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"header: {error}") from None
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(_is_text(value) for value in metadata.values()):
            raise self.damaged("__metadata__", "strings", shown(metadata))
        entries = {name: self._entry(name, value, data_start) for name, value in header.items()}
        self._check_cover(entries, data_start)
        return MappingProxyType(metadata), MappingProxyType(entries)

    def _entry(self, name: str, value: Any, data_start: int) -> TensorEntry:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self.damaged(f"entry {name!r}", "dtype, shape and data_offsets", shown(value))
        dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise self.damaged(f"dtype of {name!r}", "one of " + ", ".join(DTYPES), shown(dtype_name))
        if not _is_sizes(shape) or len(shape) > MAX_RANK:
            raise self.damaged(f"shape of {name!r}", f"at most {MAX_RANK} sizes", shown(shape))
        if not (_is_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
            raise self.damaged(f"data_offsets of {name!r}", "[begin, end]", shown(offsets))
        dtype, nbytes = DTYPES[dtype_name], offsets[1] - offsets[0]
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise self.damaged(
                f"length of {name!r}", f"{math.prod(shape) * dtype.itemsize} bytes", f"{nbytes} bytes"
            )
        return TensorEntry(dtype, tuple(shape), data_start + offsets[0], nbytes, dtype_name)

    def _check_cover(self, entries: Mapping[str, TensorEntry], data_start: int) -> None:
        """Raises SourceError unless the entries are contiguous from the data's start to the file's end."""
        end = data_start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != end:
                kind = "overlaps the one before" if entry.offset < end else "leaves a hole before it"
                raise self.damaged(f"{name!r} {kind}", f"offset {end}", entry.offset)
            end = entry.offset + entry.nbytes
        if end > self.nbytes:
            raise self._cut_off(f"{end} bytes")
        if end < self.nbytes:
            raise self.damaged("bytes after the last tensor", f"{end} bytes", self.nbytes)

    def _bytes(self, offset: int, count: int) -> bytes:
        data = np.empty(count, np.uint8)
        self.read_at(offset, data)
        return data.tobytes()

    def read_at(self, offset: int, out: np.ndarray) -> None:
        """Fills an array of bytes from an offset of the file; SourceError if it has become unreadable."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        rest = out.data
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], offset)
            except OSError as error:
                raise self._unreadable(error) from None
            if count == 0:
                raise SourceError(
                    "damaged",
                    f"{self.path} was cut off while it was read",
                    expected=f"{self.nbytes} bytes",
                    found=f"{offset}",
                    remedy="download it again, and convert when nothing writes to it",
                )
            rest, offset = rest[count:], offset + count

    def read(self, name: str, begin: int, out: np.ndarray) -> None:
        """Reads a tensor's stored bytes, from its byte ``begin`` on, until ``out`` (uint8) is full.

        Raises KeyError if the file has no such tensor, ValueError if the range ends after the tensor or the
        file is closed, and SourceError if its dtype is not a weight's or the file has become unreadable.
        """
        entry = self.entries[name]
        if entry.dtype_name not in READABLE_DTYPES:
            raise not_a_weight(name, self.path, entry)
        if begin < 0 or begin + out.nbytes > entry.nbytes:
            raise ValueError(f"bytes {begin} to {begin + out.nbytes} of {name}, which has {entry.nbytes}")
        self.read_at(entry.offset + begin, out)

    def blocks(self, name: str) -> TensorEntry | None:
        """Returns the place of a tensor's blocks of 8 bits, which a GGUF file may have (``gguf_file``)."""
        return None

    def stored_bytes(self, name: str) -> int:
        """Returns the bytes of a tensor in the file; those that ``read`` gives may be more."""
        return self.entries[name].nbytes

    def array(self, name: str) -> np.ndarray:
        """Reads a whole tensor into new memory; raises like ``read``."""
        entry = self.entries[name]
        values = np.empty(entry.shape, entry.dtype)
        self.read(name, 0, values.reshape(-1).view(np.uint8))
        return values

    def text(self, name: str) -> bytes:
        """Returns the bytes of a small tensor of any dtype, which hold a text; empty for a large one."""
        entry = self.entries[name]
        return self._bytes(entry.offset, entry.nbytes) if entry.nbytes <= MAX_TEXT_BYTES else b""

    def keep(self, prefix: str) -> None:
        """Leaves out the tensors whose names do not start with a prefix, and names the others without it."""
        kept = {key: entry for key, entry in self.entries.items() if key.startswith(prefix)}
        self.entries = MappingProxyType({key.removeprefix(prefix): entry for key, entry in kept.items()})

    def close(self) -> None:
        """Closes the file; later reads fail."""
        descriptor, self._descriptor = self._descriptor, None  # first: a signal may raise after the close
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _is_text(value: Any) -> bool:
    """Returns whether a value is a string without lone surrogates, which Python's json accepts."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _parse_int(text: str) -> int | str:
    """Parses a non-negative number; returns other text, such as -0, which the package refuses too."""
    return text if text.startswith("-") else int(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
