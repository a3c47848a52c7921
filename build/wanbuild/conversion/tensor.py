"""Reads a source tensor from start to end: its values in the stored dtype, and a checksum of its bytes."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from crc32c import crc32c

from wanbuild.conversion.quantise import Quantiser, Rows
from wanbuild.lora.deltas import Delta
from wanbuild.mapping.engine import Fill
from wanbuild.mapping.rules import PERMUTING, TRANSFORMS, halves
from wanbuild.source.gguf_file import values_of
from wanbuild.source.safetensors import TensorEntry
from wanbuild.source.scales import StoredEightBit
from wanrun import EIGHT_BITS
from wanrun.errors import SourceError


class TensorSource(Protocol):
    """A reader of source tensors; thread-safe."""

    def entry(self, key: str) -> TensorEntry:
        """Returns shape and dtype of a tensor."""
        ...

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads the tensor's stored bytes, from byte ``begin`` on, into an array of bytes."""
        ...

    def eight_bit(self, key: str) -> StoredEightBit | None:
        """Returns how the values of an 8-bit tensor are restored; None for a plain dtype."""
        ...

    def blocks(self, key: str) -> TensorEntry | None:
        """Returns the shape of a tensor that is stored as blocks of 8 bits; None for any other."""
        ...

    def read_blocks(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads the blocks of such a tensor, from byte ``begin`` on, into an array of bytes."""
        ...


class Tensor:
    """One source tensor that is read, cast and checksummed from start to end.

    Values that are stored in another order are read group by group and reordered in memory; a group is the
    whole tensor, or the rows of one head.

    Args:
        component: its component, for messages: two experts have the same keys.
        form: the form of 8 bits that ``quantised`` gives; empty if only ``cast`` is called.

    Attributes:
        crc32c: checksum of the bytes that were read; of blocks of 8 bits, of their values in float32.
        itemsize: bytes of a stored value in the source.
    """

    def __init__(
        self, fill: Fill, source: TensorSource, delta: Delta | None, component: str, form: str = ""
    ) -> None:
        self.key, self._component, self._form = fill.key, component, form
        self._source, self._delta = source, delta
        self._entry, self._eight_bit = source.entry(fill.key), source.eight_bit(fill.key)
        self.crc32c = 0
        self.itemsize = self._entry.dtype.itemsize
        block = EIGHT_BITS[form].block if form and delta is None else 0
        kept = source.blocks(fill.key) if block else None
        # Blocks that are kept are the items: they lie in rows as single values do.
        self._block, self._entry = (block, kept) if kept else (0, self._entry)
        shape, self._fill, self._group = self._entry.shape, fill, 0
        if fill.transform in PERMUTING:
            self._group = math.prod(shape)
        elif fill.head_dim:
            self._group = fill.head_dim * math.prod(shape[1:])
        self._reordered: tuple[int, np.ndarray] = -1, np.empty(0)

    def _values(self, stored: np.ndarray, start: int) -> np.ndarray:
        """Returns the values of stored items: the items, or float32 for 8-bit ones or with a delta."""
        values = stored if self._eight_bit is None else self._eight_bit.values(stored, start)
        if self._delta is None:
            return values
        values = values.astype(np.float32, copy=False)
        self._delta.add_to(values, start)
        return values

    def _stored(self, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
        """Reads items as they are stored."""
        size = self._entry.dtype.itemsize
        data = buffer[: (stop - start) * size]
        if self._block:
            self._source.read_blocks(self.key, start * size, data)
            # As of the same tensor where it is not kept: a source's digest does not depend on options.
            self.crc32c = crc32c(values_of(data.view(self._entry.dtype)).data, self.crc32c)
        else:
            self._source.read(self.key, start * size, data)
            self.crc32c = crc32c(data.data, self.crc32c)
        return data.view(self._entry.dtype)

    def _read(self, start: int, stop: int, buffer: np.ndarray, as_stored: bool = False) -> np.ndarray:
        """Returns items in the parameter's order: their values, or as they are stored."""
        if not self._group:
            stored = self._stored(start, stop, buffer)
            return stored if as_stored else self._values(stored, start)
        parts = []
        while start < stop:
            index, skip = divmod(start, self._group)
            if index != self._reordered[0]:
                self._reordered = index, self._group_of(index, as_stored)
            parts.append(self._reordered[1][skip : skip + stop - start])
            start += parts[-1].size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _group_of(self, index: int, as_stored: bool) -> np.ndarray:
        """Returns the items of a group, flat."""
        start, shape = index * self._group, self._entry.shape
        buffer = np.empty(self._group * self._entry.dtype.itemsize, np.uint8)
        values = self._stored(start, start + self._group, buffer)
        values = values if as_stored else self._values(values, start)
        if self._fill.head_dim:
            reordered = halves(values.reshape(self._fill.head_dim, *shape[1:]), self._fill.head_dim)
        else:
            reordered = TRANSFORMS[self._fill.transform](values.reshape(shape))
        return np.ascontiguousarray(reordered).reshape(-1)

    def _scales(self, first: int, count: int) -> np.ndarray:
        """Returns the scales of rows of a tensor of 8 bits, in the order of the parameter."""
        assert self._eight_bit is not None
        if not self._fill.head_dim:
            return self._eight_bit.scales(first, count)
        every = self._eight_bit.scales(0, self._entry.shape[0])
        return halves(every, self._fill.head_dim)[first : first + count]

    def cast(self, start: int, block: np.ndarray, buffer: np.ndarray) -> None:
        """Fills a block of the stored dtype with the items from ``start`` on; ``buffer`` is for read bytes.

        Raises SourceError if a value is not finite.
        """
        values = self._read(start, start + block.size, buffer)
        with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN would warn
            block[...] = values
        if not finite(block):
            raise self._not_finite(block.dtype.name)

    def quantised(self, start: int, shape: tuple[int, int], buffer: np.ndarray, quantiser: Quantiser) -> Rows:
        """Returns rows of items, rounded to 8 bits; raises SourceError if a value is not finite.

        A tensor that the source has in this form, without a delta, is kept as it is, with its scales.
        ``start`` is the first item, at the beginning of a row; ``shape`` is the rows and the items of each;
        ``buffer`` is for read bytes, and ``quantiser`` this thread's.
        """
        stop = start + shape[0] * shape[1]
        if self._block:
            rows = self._kept_blocks(start // self._block, stop // self._block, shape, buffer)
            sound = bool(np.isfinite(rows.scales).all())
        elif self._eight_bit is not None and self._entry.dtype.name == self._form and self._delta is None:
            stored = self._read(start, stop, buffer, as_stored=True).reshape(shape)
            scales = self._scales(start // shape[1], shape[0])
            wrong = ~np.isfinite(self._eight_bit.table)
            rows = Rows(stored.view(np.uint8), scales, (0.0, 0.0))
            sound = not (wrong.any() and wrong[rows.stored].any())
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                rows = quantiser(self._read(start, stop, buffer).reshape(shape), self._form)
            sound = bool(np.isfinite(rows.scales).all())
        if not sound:
            raise self._not_finite(self._form)
        return rows

    def _kept_blocks(self, start: int, stop: int, shape: tuple[int, int], buffer: np.ndarray) -> Rows:
        """Returns rows of blocks as the source stores them."""
        blocks = self._read(start, stop, buffer, as_stored=True)
        stored = np.ascontiguousarray(blocks["values"]).reshape(shape)
        return Rows(stored.view(np.uint8), blocks["scale"].reshape(shape[0], -1), (0.0, 0.0))

    def _not_finite(self, dtype: str) -> SourceError:
        merged = self._delta is not None
        return SourceError(
            "not_finite",
            f"{self._component}: {self.key} has a value that is not finite in {dtype}"
            + (" after the LoRAs were added" if merged else ""),
            expected="finite weights",
            found="NaN or infinity",
            remedy="use smaller scales" if merged else "use an undamaged checkpoint",
        )


def finite(block: np.ndarray) -> bool:
    """Returns whether all values are finite, by their exponent bits: an integer compare is cheapest."""
    bits = 8 * block.dtype.itemsize
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[block.dtype.name]
    exponents = block.view(f"u{bits // 8}") & mask
    return bool(exponents.max(initial=0) != mask)
