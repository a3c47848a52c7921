"""The layout of arrays in chunk files: what holds for every shape, and that TensorStore reads it."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from wanrun.artifact import layout as layout_module
from wanrun.artifact.layout import (
    CHECKPOINT_METADATA,
    CRC_BYTES,
    ITEM_BYTES,
    LARGE_BYTES,
    SMALL_BYTES,
    ArrayLayout,
    array_folder,
    metadata_files,
    orbax_metadata,
    plan_layout,
    zarr_metadata,
)

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


@relaxed
@given(shape=shapes, dtype=dtypes)
def test_a_stacked_row_is_a_layer(shape: tuple[int, ...], dtype: str) -> None:
    layout = plan_layout(shape, dtype, stacked=True)
    assert layout.rows == shape[0]
    assert layout.row_shape == (1, *shape[1:])
    assert layout.chunks == (1 if layout.nbytes <= SMALL_BYTES else shape[0])


@relaxed
@given(shape=shapes, dtype=dtypes)
def test_large_arrays_are_split(shape: tuple[int, ...], dtype: str) -> None:
    layout = plan_layout(shape, dtype, stacked=False)
    assert layout.chunks == layout.rows
    wanted = -(-layout.nbytes // LARGE_BYTES)
    if layout.chunks == 1:  # small, or there is no way to split it into about this many equal parts
        divisors = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and wanted <= n <= 4 * wanted]
        assert wanted == 1 or not divisors
    else:
        # At most four times as many rows as wanted, and two wanted rows are more than one LARGE_BYTES.
        assert LARGE_BYTES / 8 < layout.chunk_bytes <= LARGE_BYTES


def test_the_published_sizes() -> None:
    """Known answers: UMT5-XXL's embedding, a feed-forward of 14B, a norm of 14B."""
    embedding = plan_layout((256_384, 4096), "bfloat16", stacked=False)
    assert (embedding.rows, embedding.row_shape) == (32, (8012, 4096))
    up = plan_layout((40, 13_824, 5120), "bfloat16", stacked=True)
    assert (up.rows, up.chunks, up.chunk_bytes) == (40, 40, 141_557_760)
    norm = plan_layout((40, 5120), "float32", stacked=True)
    assert (norm.rows, norm.chunks) == (40, 1)


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
    with pytest.raises(ValueError, match=r"no layout|do not divide|not all integers"):
        ArrayLayout(shape, dtype, rows, chunks)


small_shapes = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple)


@settings(relaxed, max_examples=40)
@given(shape=small_shapes, dtype=dtypes, stacked=st.booleans(), limit=st.integers(1, 200))
def test_tensorstore_reads_what_a_layout_describes(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str, stacked: bool, limit: int
) -> None:
    """Files written from the layout alone hold the array, by the reader that plain Orbax uses."""
    with mock.patch.multiple(layout_module, SMALL_BYTES=limit, LARGE_BYTES=limit):
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


def test_the_metadata_names_every_parameter() -> None:
    layouts = {"b/c/0": plan_layout((3, 4), "float32", True), "a": plan_layout((5,), "bfloat16", False)}
    tree = orbax_metadata(layouts)["tree_metadata"]
    assert list(tree) == ["('a',)", "('b', 'c', '0')"]
    assert [key["key"] for key in tree["('b', 'c', '0')"]["key_metadata"]] == ["b", "c", "0"]
    assert array_folder("b/c/0") == "b.c.0"


def test_metadata_files() -> None:
    """All that Orbax reads beside the chunk files, the same bytes whatever order the parameters come in."""
    layouts = {"b/c/0": plan_layout((3, 4), "float32", True), "a": plan_layout((5,), "bfloat16", False)}
    files = metadata_files(layouts)
    assert files == metadata_files(dict(reversed(layouts.items())))
    assert {name: json.loads(content) for name, content in files.items()} == {
        "a/zarr.json": zarr_metadata(layouts["a"]),
        "b.c.0/zarr.json": zarr_metadata(layouts["b/c/0"]),
        "_METADATA": orbax_metadata(layouts),
        "_CHECKPOINT_METADATA": CHECKPOINT_METADATA,
    }
