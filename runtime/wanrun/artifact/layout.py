"""The layout of arrays in chunk files, which the converter writes and the runtime reads.

A component is an Orbax checkpoint of zarr3 arrays with the codecs ``bytes`` and ``crc32c``. A chunk file is
the little-endian bytes of consecutive rows of axis 0, followed by their crc32c (4 bytes, little-endian). So
a file can be read directly into its place in the final buffer, and plain Orbax or TensorStore reads the
same files and detects damage. They do not detect two swapped files; the manifest's checksum of every row
does.

A row is one index of the layer axis of a stacked parameter. A parameter that is not stacked is one row or,
if large, several equal slices of axis 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from wanrun.artifact.record import Record

CRC_BYTES = 4
ALIGNMENT = 4096
"""Parameters begin at a page in memory: reads past the page cache need that. The CPU backend aliases a host
buffer that is aligned to 64 bytes, and copies any other."""


@dataclass(frozen=True)
class EightBit:
    """A format of 8-bit weights, which have a scale for each row, or for each block of a row.

    Attributes:
        name: its name as a choice of ``wanbuild convert --quantise``.
        dtype: its dtype's name, as NumPy with ml_dtypes and JAX have it.
        largest: the largest stored value: a row's scale makes its largest magnitude this one.
        whole: whether the values are integers. A chip multiplies these at another rate than floats.
        bits: the unsigned integers that programs for XLA's CPU backend take instead, of the same bits; the
            manifest says which format they are. None: programs take the format itself.
        quality: what rounding all layers costs a video, as measured on the trained tiny models
            (benchmarks/RESULTS.md); empty: not measured, and ``wanbuild plan --best`` does not name it.
        block: inputs of a row that share a scale, float16; 0: the whole row has one, float32.
    """

    name: str
    dtype: str
    largest: float
    whole: bool = False
    bits: str | None = None
    quality: str = ""
    block: int = 0

    @property
    def form(self) -> str:
        """Its name in manifests: its dtype, which says all where a scale is for a row."""
        return self.name if self.block else self.dtype

    @property
    def scale_dtype(self) -> str:
        """The dtype of the scales."""
        return "float16" if self.block else "float32"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of weights (..., in)."""
        return (*shape[:-1], shape[-1] // self.block) if self.block else shape[:-1]


EIGHT_BITS: Mapping[str, EightBit] = MappingProxyType(
    {
        one.form: one
        for one in (
            EightBit("int8", "int8", 127.0, whole=True, quality="42 to 45 dB"),  # -128 has no opposite
            EightBit("float8", "float8_e4m3fn", 448.0, bits="uint8", quality="31 to 35 dB"),
            EightBit("e5m2", "float8_e5m2", 57344.0, bits="uint8"),
            EightBit("q8_0", "int8", 127.0, whole=True, block=32),  # GGUF's
        )
    }
)
"""The formats of 8-bit weights by their names in manifests. A new one is a row."""

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, **{one.dtype: 1 for one in EIGHT_BITS.values()}}
)

BITS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "uint16", **{one.dtype: one.bits for one in EIGHT_BITS.values() if one.bits is not None}}
)
"""The dtypes that programs for XLA's CPU backend take as unsigned integers of the same bits, and as which."""


Count = Annotated[int, Meta(ge=1)]


class ArrayLayout(Record, frozen=True):
    """Rows and chunk files of one parameter.

    Attributes:
        shape: the array's shape, at least one dimension.
        dtype: its dtype's name.
        rows: number of checksummed rows, a divisor of ``shape[0]``.
        chunks: number of chunk files, a divisor of ``rows``.
    """

    shape: Annotated[tuple[Count, ...], Meta(min_length=1)]
    dtype: str
    rows: Count
    chunks: Count

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"no layout for dtype {self.dtype}")
        if self.shape[0] % self.rows or self.rows % self.chunks:
            raise ValueError(f"{self.rows} rows in {self.chunks} chunks do not divide {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; its first axis is 1 for a stacked parameter."""
        return (self.shape[0] // self.rows, *self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.shape[0] // self.chunks, *self.shape[1:])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of array data in one chunk file; the file is CRC_BYTES longer."""
        return self.nbytes // self.chunks

    @property
    def rows_per_chunk(self) -> int:
        return self.rows // self.chunks

    def chunk_file(self, index: int) -> str:
        """Returns a chunk's file, relative to the array's folder, in zarr3's default key encoding."""
        return "/".join(["c", str(index), *["0"] * (len(self.shape) - 1)])


def array_folder(path: str) -> str:
    """Returns a parameter's folder in its checkpoint, as Orbax names it: ``a/b/c`` -> ``a.b.c``."""
    return path.replace("/", ".")


def zarr_metadata(layout: ArrayLayout) -> dict[str, Any]:
    """Returns the content of the array's zarr.json."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.chunk_shape)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
