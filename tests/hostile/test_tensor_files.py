"""The reader of weight files refuses every broken one, and each command some; random files."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from hypothesis import HealthCheck, event, given, settings
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save, save_file

from helpers.single_files import write_all_in_one, write_single_files, write_with_published_heads
from hostile.refusal import check_named, first_of_each, refusal, time_limit
from hostile.tensor_files import GGUF, SAFETENSORS, Row, join
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.source.safetensors import DTYPES, WEIGHT_DTYPES, TensorFile
from wanrun.errors import SourceError


class Reader(NamedTuple):
    """A command that reads one file: where the file is, the command, and its own code, if it has one."""

    file: Path
    arguments: tuple[object, ...]
    code: str | None = None


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """Each command that reads weights, with a file that it takes."""
    folder = tmp_path_factory.mktemp("readers")
    checkpoint, place = folder / "checkpoint", ("--artifact", folder / "new")
    write_with_published_heads(checkpoint, "wan2.1-t2v")
    files = write_single_files(checkpoint, folder / "files")
    whole, lora = (folder / "files" / f"{name}.safetensors" for name in ("all", "lora"))
    artifact = folder / "artifact"
    write_all_in_one(files, whole)
    rng, module = np.random.default_rng(0), "transformer.blocks.0.attn1.to_q"
    width = TensorFile(files["transformer"]).entries["blocks.0.self_attn.q.weight"].shape[0]
    down, up = (rng.standard_normal(shape, np.float32) for shape in ((4, width), (width, 4)))
    save_file({f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, lora)
    convert(ConvertRequest(checkpoint, artifact))
    source = ("convert", checkpoint, *place)
    weights = "diffusion_pytorch_model.safetensors"
    return {
        "transformer": Reader(checkpoint / "transformer" / weights, source),
        "vae": Reader(checkpoint / "vae" / weights, source),
        "text encoder": Reader(checkpoint / "text_encoder" / "model.safetensors", source),
        "part": Reader(files["vae"], (*source, "--vae", files["vae"])),
        "all in one": Reader(whole, ("convert", whole, *place, "--tokenizer", files["tokenizer"])),
        "LoRA": Reader(lora, (*source, "--lora", lora), code="unsupported"),
        "adapter": Reader(lora, ("lora", lora, "--artifact", artifact, "--name", "x"), code="unsupported"),
    }


GOOD = {"a.weight": (5, 3, 2, 2), "b": (70,), "c.bias": (3, 4), "blocks.0.d": (40, 9)}
"""Shapes of a good file."""


@pytest.mark.parametrize("row", SAFETENSORS, ids=lambda row: row.name)
def test_a_broken_file_is_refused(row: Row, tmp_path: Path) -> None:
    path, draw = tmp_path / "x.safetensors", np.random.default_rng(zlib.crc32(row.name.encode()))
    values = {name: draw.standard_normal(shape, np.float32) for name, shape in GOOD.items()}
    path.write_bytes(row.make(draw, save(values)))
    with time_limit(), pytest.raises(SourceError) as caught:
        TensorFile(path)
    assert caught.value.remedy is not None
    check_named({"code": caught.value.code, "message": str(caught.value)}, row.code, (path, *row.values))


def kind(row: Row) -> tuple[str, str]:
    """The code, and what has made the bytes."""
    return row.code, row.make.__qualname__


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), first_of_each(SAFETENSORS, kind))
def test_a_command_refuses_a_broken_file(
    number: int, row: Row, readers: Mapping[str, Reader], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them; with all rows each command meets every code."""
    reader = readers[sorted(readers)[number % len(readers)]]
    good = reader.file.read_bytes()
    reader.file.write_bytes(row.make(np.random.default_rng(zlib.crc32(row.name.encode())), good))
    try:
        error = refusal(capsys, reader.file.parents[1], wanbuild, reader.arguments, 4)
        check_named(error, reader.code or row.code, (reader.file.name, *row.values))
    finally:
        reader.file.write_bytes(good)


@pytest.mark.slow
@pytest.mark.parametrize("row", GGUF, ids=lambda row: row.name)
def test_a_broken_gguf_is_refused(
    row: Row, toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_tensor("b", quantize(np.ones((2, 64), np.float32), Kind.Q8_0), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(row.make(np.random.default_rng(0), path.read_bytes()))
    arguments = ("convert", toy_checkpoint, "--artifact", tmp_path / "new", "--transformer", path)
    check_named(refusal(capsys, tmp_path, wanbuild, arguments, 4), row.code, (path, *row.values))


# --- random files: never laxer than the safetensors package -------------------------------------------------

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


def taken_as_by_the_package(path: Path, content: bytes) -> bool:
    """Writes a file; whether the reader takes it, which then covers it and agrees with the package."""
    path.write_bytes(content)
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
def test_a_good_file_is_taken(tmp_path: Path, tensors: dict[str, Any], texts: dict[str, str] | None) -> None:
    header, data = header_and_data(tensors)
    if texts is not None:
        header["__metadata__"] = texts
    assert taken_as_by_the_package(tmp_path / "x.safetensors", join(header, data))


@pytest.mark.slow
@PROPERTY
@given(contents, metadata)
def test_what_the_package_writes_is_taken(
    tmp_path: Path, tensors: dict[str, Any], texts: dict[str, str] | None
) -> None:
    """It pads the header with spaces, and orders tensors by dtype and name."""
    rng = np.random.default_rng(len(tensors))
    arrays = {
        name: rng.integers(0, 2, shape).astype(DTYPES[dtype])
        for name, (dtype, shape) in tensors.items()
        if not dtype.startswith("F8")  # not every version of the package writes these
    }
    content = save(arrays, texts or None)  # it writes no valid file of empty metadata and no tensors
    assert taken_as_by_the_package(tmp_path / "x.safetensors", content)


@PROPERTY
@given(st.binary(max_size=200), st.integers(-2, 2), st.booleans())
def test_any_bytes(tmp_path: Path, content: bytes, off: int, framed: bool) -> None:
    """Bytes alone, or with a length before them that is theirs, or nearly."""
    if framed:
        content = struct.pack("<Q", max(0, len(content) + off)) + content
    taken_as_by_the_package(tmp_path / "x.safetensors", content)


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
def test_never_laxer_than_the_package(tmp_path: Path, file: tuple[bytes, bytes]) -> None:
    content = join(*file)
    taken = taken_as_by_the_package(tmp_path / "x.safetensors", content)
    try:
        deserialize(content)
    except SafetensorError:
        assert not taken
        event("both refuse")
    else:
        event("both take" if taken else "only ours refuses")
