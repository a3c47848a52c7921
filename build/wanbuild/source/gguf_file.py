"""Reads a GGUF file by position: its tensors as they are, or dequantised to float32, block by block.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, numbers of tensors and
of facts; the facts, each a name, a type and a value; for each tensor a name, its dimensions (the innermost
first), a type and an offset; then the data, aligned. What the bytes of each type stand for is known to the
package ``gguf`` (``gguf.quants.dequantize``), whose own reader maps the file and trusts it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from wanbuild.source.safetensors import DTYPES, GGUF, WEIGHT_DTYPES, TensorEntry, TensorFile, first_bytes
from wanrun.errors import SourceError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAX_COUNT: Final = 200_000
"""The most tensors, and the most facts, of a file."""

MAX_HEADER_BYTES: Final = 64 << 20

_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
"""struct's formats of a fact's value by the number of its type; 8 is a text, 9 a list."""

Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])
"""A block of the type Q8_0: 32 values of 8 bits, and their factor."""

_TEXT, _LIST = 8, 9
_SHAPE = "comfy.gguf.orig_shape."
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class _Blocks:
    """How a tensor is stored: in blocks of ``items`` values in ``nbytes`` bytes."""

    kind: GGMLQuantizationType
    offset: int
    items: int
    nbytes: int


class GgufFile(TensorFile):
    """One GGUF file, open for reading; thread-safe, and a context manager.

    Quantised tensors have the dtype float32 in ``entries``, and ``read`` dequantises them. The constructor
    raises SourceError if the file is missing or unreadable, breaks the format, or has an unknown type.
    """

    kind = "GGUF"

    def __init__(self, path: Path) -> None:
        self._blocks: dict[str, _Blocks] = {}
        super().__init__(path)

    def _read_header(self) -> tuple[Mapping[str, str], Mapping[str, TensorEntry]]:
        head = _Header(self._bytes(0, min(self.nbytes, MAX_HEADER_BYTES)), self)
        if head.take("<4s") != GGUF or head.take("<I") not in (2, 3):
            raise self.damaged("its first bytes", "GGUF of version 2 or 3")
        tensors, facts = head.count("tensors"), head.count("facts")
        known = dict(head.fact() for _ in range(facts))
        infos = [head.tensor() for _ in range(tensors)]
        alignment = known.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.damaged(_ALIGNMENT, "a power of two", alignment)
        start, entries, ends = -(-head.position // alignment) * alignment, dict[str, TensorEntry](), [(0, 0)]
        for name, shape, number, offset in infos:
            if name in entries:
                raise self.damaged(f"{name!r} is there twice")
            shape = self._own_shape(name, shape, known)
            entries[name], end = self._tensor(name, shape, number, start + offset)
            ends.append((start + offset, end))
        ends.sort()
        if any(begin < before for (_, before), (begin, end) in pairwise(ends) if end > begin):
            raise self.damaged("tensors overlap")
        texts = {name: value for name, value in known.items() if isinstance(value, str)}
        return MappingProxyType(texts), MappingProxyType(entries)

    def _own_shape(self, name: str, shape: tuple[int, ...], known: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape that a tensor had before it was made to fit the blocks (ComfyUI-GGUF)."""
        own = known.get(_SHAPE + name)
        if own is None:
            return shape
        if not isinstance(own, list) or not all(type(size) is int and size > 0 for size in own):
            raise self.damaged(f"{_SHAPE}{name}", "sizes", own)
        if math.prod(own) != math.prod(shape):
            raise self.damaged(f"{_SHAPE}{name}", f"a shape of {math.prod(shape)} values", own)
        return tuple(own)

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> tuple[TensorEntry, int]:
        """Returns a tensor's entry, and where its stored bytes end."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.damaged(f"the type of {name!r}", "a type that gguf knows", number) from None
        if kind.name not in WEIGHT_DTYPES and not _is_read(kind):
            raise SourceError(
                "wrong_kind",
                f"{name} in {self.path} is quantized as {kind.name}, which is not read",
                expected=f"{', '.join(sorted(WEIGHT_DTYPES))} or a K-, Q- or IQ-type of the package gguf",
                remedy="use a file of another type, or the published checkpoint",
            )
        items, nbytes = GGML_QUANT_SIZES[kind]
        count = math.prod(shape)
        if count % items:
            raise self.damaged(f"the shape of {name!r}", f"a multiple of {items} values", list(shape))
        end = offset + count // items * nbytes
        if end > self.nbytes:
            raise self._cut_off(f"{end} bytes")
        if kind.name in WEIGHT_DTYPES:
            return TensorEntry(DTYPES[kind.name], shape, offset, end - offset, kind.name), end
        self._blocks[name] = _Blocks(kind, offset, items, nbytes)
        return TensorEntry(DTYPES["F32"], shape, offset, 4 * count, "F32"), end

    def keep(self, prefix: str) -> None:
        super().keep(prefix)
        kept = {name: blocks for name, blocks in self._blocks.items() if name.startswith(prefix)}
        self._blocks = {name.removeprefix(prefix): blocks for name, blocks in kept.items()}

    def stored_bytes(self, name: str) -> int:
        entry = self.entries[name]
        if (blocks := self._blocks.get(name)) is None:
            return entry.nbytes
        return math.prod(entry.shape) // blocks.items * blocks.nbytes

    def blocks(self, name: str) -> TensorEntry | None:
        """Returns the place of a matrix of Q8_0, whose rows are whole blocks, ``Q8_0`` (out, in / 32)."""
        entry, stored = self.entries[name], self._blocks.get(name)
        items = Q8_0["values"].shape[0]
        if stored is None or stored.kind.name != "Q8_0" or len(entry.shape) != 2 or entry.shape[1] % items:
            return None
        shape = entry.shape[0], entry.shape[1] // items
        return TensorEntry(Q8_0, shape, stored.offset, self.stored_bytes(name), "Q8_0")

    def read(self, name: str, begin: int, out: np.ndarray) -> None:
        """Reads a tensor's bytes, in float32 if it is quantised, as ``TensorFile.read`` does."""
        if (blocks := self._blocks.get(name)) is None:
            super().read(name, begin, out)
            return
        from gguf.quants import dequantize

        nbytes = self.entries[name].nbytes
        if begin < 0 or begin + out.nbytes > nbytes or begin % 4 or out.nbytes % 4:
            raise ValueError(f"bytes {begin} to {begin + out.nbytes} of {name}, which has {nbytes}")
        first, last = begin // 4, (begin + out.nbytes) // 4
        start, stop = first // blocks.items, -(-last // blocks.items)
        stored = np.empty((stop - start) * blocks.nbytes, np.uint8)
        self.read_at(blocks.offset + start * blocks.nbytes, stored)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite is refused later
            values = dequantize(stored.reshape(-1, blocks.nbytes), blocks.kind).reshape(-1)
        chosen = values[first - start * blocks.items : last - start * blocks.items]
        out[...] = np.ascontiguousarray(chosen, np.float32).view(np.uint8)


def values_of(blocks: np.ndarray) -> np.ndarray:
    """Returns the values of blocks of ``Q8_0``, float32 (blocks, 32)."""
    scales = blocks["scale"].astype(np.float32)[:, None]
    with np.errstate(invalid="ignore"):  # a scale that is not finite is refused later
        return np.multiply(blocks["values"], scales, dtype=np.float32)


@lru_cache
def _is_read(kind: GGMLQuantizationType) -> bool:
    """Whether ``gguf`` dequantises a type."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Header:
    """Reads one item after the other from ``data``, the beginning of a file."""

    def __init__(self, data: bytes, file: GgufFile) -> None:
        self._data, self._file, self.position = data, file, 0

    def take(self, form: str) -> Any:
        """Returns a number, or bytes, of a format of struct."""
        try:
            (value,) = struct.unpack_from(form, self._data, self.position)
        except struct.error:
            raise self._file.damaged("its header is cut off, or too long") from None
        self.position += struct.calcsize(form)
        return value

    def count(self, what: str) -> int:
        """Returns a count."""
        found = int(self.take("<Q"))
        if found > MAX_COUNT:
            raise self._file.damaged(f"the number of {what}", f"at most {MAX_COUNT}", found)
        return found

    def text(self) -> str:
        """Returns a text."""
        length = int(self.take("<Q"))
        if length > len(self._data) - self.position:
            raise self._file.damaged("its header is cut off, or too long")
        raw = self._data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", errors="backslashreplace")

    def fact(self) -> tuple[str, Any]:
        """Returns a fact's name and value; for a list of texts None, which nothing uses."""
        name = self.text()
        return name, self._value(self.take("<I"))

    def _value(self, number: int, depth: int = 0) -> Any:
        if number == _TEXT:
            return self.text()
        if number == _LIST and depth < 4:
            inner, length = self.take("<I"), int(self.take("<Q"))
            if length > len(self._data) - self.position:  # each value takes a byte or more
                raise self._file.damaged("its header is cut off, or too long")
            values = [self._value(inner, depth + 1) for _ in range(length)]
            return None if inner == _TEXT else values
        if number >= len(_FORMATS) or not _FORMATS[number]:
            raise self._file.damaged("the type of a fact", "0 to 12", number)
        return self.take(f"<{_FORMATS[number]}")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns a tensor's name, shape with the outermost size first, type and offset."""
        name, rank = self.text(), self.take("<I")
        if rank > 8:
            raise self._file.damaged(f"the rank of {name!r}", "at most 8", rank)
        sizes = [int(self.take("<Q")) for _ in range(rank)]
        if math.prod(sizes) >= 1 << 48:
            raise self._file.damaged(f"the shape of {name!r}", "fewer than 2^48 values", sizes)
        return name, tuple(reversed(sizes)), self.take("<I"), int(self.take("<Q"))


def weight_file(path: Path) -> TensorFile:
    """Opens a GGUF or a safetensors file, by its first bytes; raises as ``GgufFile`` or ``TensorFile``."""
    return GgufFile(path) if first_bytes(path).startswith(GGUF) else TensorFile(path)
