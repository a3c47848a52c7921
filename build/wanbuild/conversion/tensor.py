"""A source tensor read from start to end: its values in the stored dtype, and a checksum of its bytes."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from crc32c import crc32c

from wanbuild.conversion.quantise import Quantiser, Rows
from wanbuild.lora.deltas import Delta
from wanbuild.mapping.engine import Fill
from wanbuild.mapping.rules import PERMUTING, TRANSFORMS
from wanbuild.source.eight_bit import EightBit
from wanbuild.source.safetensors import TensorEntry
from wanrun.errors import SourceError


class TensorSource(Protocol):
    """A reader of source tensors; thread-safe."""

    def entry(self, key: str) -> TensorEntry:
        """Returns shape and dtype of a tensor."""
        ...

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads the tensor's stored bytes, from byte ``begin`` on, into an array of bytes."""
        ...

    def eight_bit(self, key: str) -> EightBit | None:
        """Returns how the values of an 8-bit tensor are restored; None for a plain dtype."""
        ...


class Tensor:
    """One source tensor that is read, cast and checksummed from start to end.

    Args:
        fill: its key and transform.
        source: its reader.
        delta: a delta to add, or None.
        component: its component, for messages: two experts have the same keys.

    Attributes:
        key: the source tensor's name.
        crc32c: checksum of the bytes that were read.
        itemsize: bytes of a stored value in the source.
    """

    def __init__(self, fill: Fill, source: TensorSource, delta: Delta | None, component: str) -> None:
        self.key, self._component = fill.key, component
        self._source, self._delta = source, delta
        self._entry, self._eight_bit = source.entry(fill.key), source.eight_bit(fill.key)
        self.crc32c = 0
        self._permuted: np.ndarray | None = None
        self.itemsize = self._entry.dtype.itemsize
        if fill.transform in PERMUTING:
            self._permuted = self._permute(fill.transform)

    def _permute(self, transform: str) -> np.ndarray:
        """Returns the whole tensor with permuted axes, flat and in its own dtype (or float32, see below)."""
        values = np.empty(math.prod(self._entry.shape), self._entry.dtype)
        data = values.view(np.uint8)
        self._source.read(self.key, 0, data)
        self.crc32c = crc32c(data.data)
        values = self._values(values, 0)
        return np.ascontiguousarray(TRANSFORMS[transform](values.reshape(self._entry.shape))).reshape(-1)

    def _values(self, stored: np.ndarray, start: int) -> np.ndarray:
        """Returns the values of stored items: those themselves, or float32 of 8-bit ones or with a delta."""
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
        self._source.read(self.key, start * size, data)
        self.crc32c = crc32c(data.data, self.crc32c)
        return data.view(self._entry.dtype)

    def _read(self, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
        if self._permuted is not None:
            return self._permuted[start:stop]
        return self._values(self._stored(start, stop, buffer), start)

    def cast(self, start: int, block: np.ndarray, buffer: np.ndarray) -> None:
        """Fills a block of the stored dtype with the items from ``start`` on; ``buffer`` is for read bytes.

        Raises:
            SourceError: if a value is not finite.
        """
        values = self._read(start, start + block.size, buffer)
        with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN would warn
            block[...] = values
        if not finite(block):
            raise self._not_finite(block.dtype.name)

    def quantised(
        self, start: int, shape: tuple[int, int], dtype: str, buffer: np.ndarray, quantiser: Quantiser
    ) -> Rows:
        """Returns rows of items from ``start`` on, rounded to 8 bits.

        8-bit values of this dtype, to which nothing is added, are kept as they are, with their scales.

        Args:
            start: the first item, at the beginning of a row.
            shape: rows, and items of each.
            dtype: the stored dtype.
            buffer: for read bytes.
            quantiser: this thread's.

        Raises:
            SourceError: if a value is not finite.
        """
        stop = start + shape[0] * shape[1]
        if self._eight_bit is not None and self._entry.dtype.name == dtype and self._delta is None:
            stored = self._stored(start, stop, buffer).reshape(shape)
            scales, wrong = (
                self._eight_bit.scales(start // shape[1], shape[0]),
                ~np.isfinite(self._eight_bit.table),
            )
            rows = Rows(stored.view(np.uint8), scales, (0.0, 0.0))
            sound = not (wrong.any() and wrong[rows.stored].any())
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                rows = quantiser(self._read(start, stop, buffer).reshape(shape), dtype)
            sound = bool(np.isfinite(rows.scales).all())
        if not sound:
            raise self._not_finite(dtype)
        return rows

    def _not_finite(self, dtype: str) -> SourceError:
        merged = self._delta is not None
        return SourceError(
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
