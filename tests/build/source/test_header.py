"""Properties of the safetensors reader, over random files: never laxer than the safetensors package."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from wanbuild.source.safetensors import DTYPES, WEIGHT_DTYPES, TensorFile
from wanrun.errors import SourceError

# Derandomised: a run is the same every time. The file is written anew for each example.
PROPERTY = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20) | st.sampled_from(
    ["a.weight", "blocks.0.attn1.to_q.weight", ""]
)
shapes = st.lists(st.integers(0, 4), max_size=4)
contents = st.dictionaries(
    names.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    max_size=6,
)
metadata = st.none() | st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=10))


def header_and_data(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], bytes]:
    """Entries end to end, in the order of the dict, and random data."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return header, np.random.default_rng(position).bytes(position)


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(raw)) + raw + data
    path.write_bytes(content)
    return content


def check(path: Path, content: bytes) -> bool:
    """Whether the reader takes the file; if so, it covers the file, and the package takes it for the same."""
    try:
        file = TensorFile(path)
    except SourceError as error:
        assert str(error).isprintable() and str(path) in str(error) and len(str(error)) < 5000
        return False
    with file:
        end = 8 + int.from_bytes(content[:8], "little")
        for entry in sorted(file.entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            assert entry.offset == end and entry.nbytes == math.prod(entry.shape) * entry.dtype.itemsize
            end += entry.nbytes
        assert end == len(content)
        with safe_open(path, "numpy") as theirs:
            assert set(theirs.keys()) == file.entries.keys()
            assert (theirs.metadata() or {}) == file.metadata
        for name, tensor in deserialize(content):
            entry = file.entries[name]
            assert (list(entry.shape), entry.dtype_name) == (tensor["shape"], tensor["dtype"])
            assert content[entry.offset : entry.offset + entry.nbytes] == bytes(tensor["data"])
            if entry.dtype_name in WEIGHT_DTYPES:
                array = file.array(name)
                assert (array.shape, array.dtype) == (entry.shape, DTYPES[entry.dtype_name])
                assert array.tobytes() == bytes(tensor["data"])
    return True


@pytest.mark.slow
@PROPERTY
@given(contents, metadata)
def test_a_good_file_is_taken(scratch: Path, tensors: dict[str, Any], texts: dict[str, str] | None) -> None:
    header, data = header_and_data(tensors)
    if texts is not None:
        header["__metadata__"] = texts
    assert check(scratch / "x.safetensors", write(scratch / "x.safetensors", header, data))


@pytest.mark.slow
@PROPERTY
@given(contents, metadata)
def test_what_the_package_writes_is_taken(
    scratch: Path, tensors: dict[str, Any], texts: dict[str, str] | None
) -> None:
    """It pads the header with spaces, and orders tensors by dtype and name."""
    rng = np.random.default_rng(len(tensors))
    arrays = {
        name: rng.integers(0, 2, shape).astype(DTYPES[dtype])
        for name, (dtype, shape) in tensors.items()
        if not dtype.startswith("F8")  # not every version of the package writes these
    }
    content = save(arrays, texts or None)  # it writes no valid file of empty metadata and no tensors
    (scratch / "x.safetensors").write_bytes(content)
    assert check(scratch / "x.safetensors", content)


@PROPERTY
@given(st.binary(max_size=200), st.integers(-2, 2), st.booleans())
def test_any_bytes(scratch: Path, content: bytes, off: int, framed: bool) -> None:
    """Bytes alone, or with a length before them that is theirs, or nearly."""
    if framed:
        content = struct.pack("<Q", max(0, len(content) + off)) + content
    (scratch / "x.safetensors").write_bytes(content)
    check(scratch / "x.safetensors", content)


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-8, 40),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(),
    st.sampled_from([*DTYPES, "F4", "f32", "C64", ""]),
    st.lists(st.integers(-4, 40), max_size=3),
    st.just({}),
)

PIECES = (b"", b" ", b"0", b"-", b"-0", b"1e0", b'"', b"{", b"]", b",", b"\\ud800", b"\xff")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A good header in which a few values, fields or bytes are changed, and its data."""
    header, data = header_and_data(draw(contents.filter(len)))
    for _ in range(draw(st.integers(0, 2))):
        entry = header[draw(st.sampled_from(sorted(header)))]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
        values = entry.get(field)
        if isinstance(values, list) and values and draw(st.booleans()):
            values[draw(st.integers(0, len(values) - 1))] = draw(odd_values)
        elif draw(st.integers(0, 4)):
            entry[field] = draw(odd_values)
        else:
            entry.pop(field, None)
    if draw(st.booleans()):
        header["__metadata__"] = draw(metadata | odd_values)
    if draw(st.integers(0, 4)) == 0:  # from some place on, everything lies later or earlier
        place, by = draw(st.integers(0, max(1, len(data)))), draw(st.sampled_from([-4, -1, 1, 4]))
        for entry in header.values():
            offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
            if isinstance(offsets, list) and len(offsets) == 2 and all(type(x) is int for x in offsets):
                entry["data_offsets"] = [x + by if offsets[0] >= place else x for x in offsets]
        data = data[:place] + bytes(max(by, 0)) + data[place + max(-by, 0) :]
    raw = bytearray(json.dumps(header, ensure_ascii=draw(st.booleans())).encode())
    for _ in range(draw(st.integers(0, 2))):
        position = draw(st.integers(0, len(raw) - 1))
        piece = draw(st.sampled_from(PIECES))
        raw[position : position + draw(st.integers(0, 1))] = piece
    cut, more = draw(st.sampled_from([(0, b""), (0, b""), (0, b""), (1, b""), (0, b"x")]))
    return bytes(raw), data[: len(data) - cut] + more


@pytest.mark.thorough
@settings(PROPERTY, max_examples=800)
@given(damaged())
def test_never_laxer_than_the_package(scratch: Path, file: tuple[bytes, bytes]) -> None:
    content = write(scratch / "x.safetensors", *file)
    taken = check(scratch / "x.safetensors", content)
    try:
        deserialize(content)
    except SafetensorError:
        assert not taken
        event("both refuse")
    else:
        event("both take" if taken else "only ours refuses")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[-0,0]}}',
        b'{"__metadata__":{"format":"\\ud800"}}',
        b'{"a":{"dtype":"F32","shape":[0.0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}',
    ],
)
def test_what_python_s_json_reads_and_the_package_s_does_not(scratch: Path, raw: bytes) -> None:
    content = write(scratch / "x.safetensors", raw, bytes(range(4)) if b"0,4" in raw else b"")
    with pytest.raises(SafetensorError):
        deserialize(content)
    assert not check(scratch / "x.safetensors", content)
