"""What is written beside the chunk files, and how parameters are split into them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanbuild.conversion.orbax import (
    CHECKPOINT_METADATA,
    LARGE_BYTES,
    SMALL_BYTES,
    metadata_files,
    orbax_metadata,
    plan_layout,
)
from wanrun.artifact.layout import ITEM_BYTES, array_folder, zarr_metadata

# No files in the checkout, no failures on a busy machine, and the same examples in every run.
relaxed = settings(deadline=None, database=None, derandomize=True)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
# Axes from one to a vocabulary: sizes from bytes to terabytes, primes among them. Nothing is allocated.
shapes = st.lists(st.integers(1, 300_000), min_size=1, max_size=5).map(tuple)


@pytest.mark.slow
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
