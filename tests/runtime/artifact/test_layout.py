"""The layout of arrays in chunk files: what holds for every shape, and that TensorStore reads it."""

from __future__ import annotations

import math
import zlib
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import tensorstore as ts
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from wanbuild.conversion import orbax
from wanbuild.conversion.orbax import (
    plan_layout,
)
from wanrun.artifact.layout import CRC_BYTES, ITEM_BYTES, ArrayLayout, zarr_metadata

# No files in the checkout, no failures on a busy machine, and the same examples in every run.
relaxed = settings(deadline=None, database=None, derandomize=True)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
# Axes from one to a vocabulary: sizes from bytes to terabytes, primes among them. Nothing is allocated.
shapes = st.lists(st.integers(1, 300_000), min_size=1, max_size=5).map(tuple)


@relaxed
@given(shape=shapes, dtype=dtypes, stacked=st.booleans())
def test_rows_and_chunks_divide_the_array(shape: tuple[int, ...], dtype: str, stacked: bool) -> None:
    layout = plan_layout(shape, dtype, stacked)
    assert layout.nbytes == math.prod(shape) * ITEM_BYTES[dtype]
    assert layout.rows * layout.row_bytes == layout.nbytes
    assert layout.chunks * layout.chunk_bytes == layout.nbytes
    assert layout.rows_per_chunk * layout.chunks == layout.rows
    assert layout.row_bytes == math.prod(layout.row_shape) * ITEM_BYTES[dtype]
    assert layout.chunk_bytes == math.prod(layout.chunk_shape) * ITEM_BYTES[dtype]
    assert layout.row_shape[1:] == layout.chunk_shape[1:] == shape[1:]
    assert len({layout.chunk_file(index) for index in range(min(layout.chunks, 1000))}) == min(
        layout.chunks, 1000
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "chunks"),
    [
        ((), "float32", 1, 1),
        ((0, 4), "float32", 1, 1),
        ((4, -1), "float32", 1, 1),
        ((4, 4), "float64", 1, 1),
        ((4, 4), "float32", 3, 1),
        ((4, 4), "float32", 0, 1),
        ((4, 4), "float32", 4, 3),
        ((4, 4), "float32", 4, 0),
        ((4, 4), "float32", 2, 4),
        ((4.0, 4), "float32", 2, 2),
        ((4, 4), "float32", 2.0, 2),
        ((4, 4), "float32", True, 1),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(shape: Any, dtype: str, rows: Any, chunks: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"shape": shape, "dtype": dtype, "rows": rows, "chunks": chunks}, ArrayLayout)


small_shapes = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple)


@settings(relaxed, max_examples=40)
@given(shape=small_shapes, dtype=dtypes, stacked=st.booleans(), limit=st.integers(1, 200))
def test_tensorstore_reads_what_a_layout_describes(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str, stacked: bool, limit: int
) -> None:
    """Files written from the layout alone hold the array, by the reader that plain Orbax uses."""
    with mock.patch.multiple(orbax, SMALL_BYTES=limit, LARGE_BYTES=limit):
        layout = plan_layout(shape, dtype, stacked)
    seed = zlib.crc32(repr((shape, dtype)).encode())
    data = np.random.default_rng(seed).integers(0, 0x70, layout.nbytes, np.uint8).tobytes()
    folder = tmp_path_factory.mktemp("array")
    (folder / "zarr.json").write_text(str(zarr_metadata(layout)).replace("'", '"'))
    for index in range(layout.chunks):
        content = data[index * layout.chunk_bytes : (index + 1) * layout.chunk_bytes]
        file = folder / layout.chunk_file(index)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content + crc32c(content).to_bytes(CRC_BYTES, "little"))
    kvstore = {"driver": "file", "path": f"{folder}/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()
    assert array.shape == shape
    assert array.dtype.name == dtype
    assert array.tobytes() == data
