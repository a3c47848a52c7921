"""Bad weight files, generated: each is refused with exit code 4 and one line, soon, and nothing is left."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.hostile import (
    INDEX,
    JSON_FILES,
    SHARD,
    WEIGHTS,
    Case,
    Change,
    Checkpoint,
    assert_refused,
    checkpoint_of,
    edit_tensors,
    header_end,
    join,
    split,
    tensor_names,
)
from wanbuild.cli import wanbuild
from wancli.console import run

# --- whole files of weights ---------------------------------------------------------------------------------


def between_tensors(checkpoint: Checkpoint, raw: bytes) -> int:
    header, _ = split(raw)
    ends = sorted(value["data_offsets"][1] for name, value in header.items() if name != "__metadata__")
    return header_end(raw) + ends[checkpoint.rng.integers(len(ends) - 1)]


CUTS: dict[str, Callable[[Checkpoint, bytes], int]] = {
    "nothing": lambda c, raw: 0,
    "one byte": lambda c, raw: 1,
    "in the length": lambda c, raw: 7,
    "after the length": lambda c, raw: 8,
    "in the header": lambda c, raw: int(c.rng.integers(9, header_end(raw) - 1)),
    "before the header's last byte": lambda c, raw: header_end(raw) - 1,
    "after the header": lambda c, raw: header_end(raw),
    "after the data's first byte": lambda c, raw: header_end(raw) + 1,
    "between tensors": between_tensors,
    "in the data": lambda c, raw: int(c.rng.integers(header_end(raw) + 2, len(raw) - 1)),
    "before the last byte": lambda c, raw: len(raw) - 1,
}


def cut(component: str, where: Callable[[Checkpoint, bytes], int]) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        raw = checkpoint.read(WEIGHTS[component])
        checkpoint.write(WEIGHTS[component], raw[: where(checkpoint, raw)])

    return change


LENGTHS: dict[str, Callable[[bytes], int]] = {
    "zero": lambda raw: 0,
    "one": lambda raw: 1,
    "two": lambda raw: 2,
    "one less": lambda raw: header_end(raw) - 9,
    "one more": lambda raw: header_end(raw) - 7,
    "the file's": lambda raw: len(raw),
    "all that is left": lambda raw: len(raw) - 8,
    "one more than is left": lambda raw: len(raw) - 7,
    "over the limit": lambda raw: 100_000_001,
    "2^31": lambda raw: 2**31,
    "2^32": lambda raw: 2**32,
    "2^63 - 1": lambda raw: 2**63 - 1,
    "2^63": lambda raw: 2**63,
    "2^64 - 1": lambda raw: 2**64 - 1,
    "big-endian": lambda raw: int.from_bytes(raw[:8], "big"),
}


def length(value: Callable[[bytes], int]) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        name = checkpoint.weights()
        raw = checkpoint.read(name)
        checkpoint.write(name, struct.pack("<Q", value(raw)) + raw[8:])

    return change


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS: dict[str, bytes] = {
    "empty": b"",
    "an empty object": b"{}",
    "a list": b"[]",
    "a string": b'"abc"',
    "null": b"null",
    "NUL bytes": bytes(64),
    "not UTF-8": b'{"\xff\xfe":' + ENTRY + b"}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "white space first": b" {}",
    "cut-off JSON": b'{"a":{"dtype":"F32"',
    "a trailing comma": b'{"a":' + ENTRY + b",}",
    "single quotes": b"{'a': 1}",
    "two objects": b"{}{}",
    "NaN": b'{"a":NaN}',
    "a number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "deeply nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deeply nested lists": b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a tensor twice": b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}",
    "a field twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "an escape sequence in a name": b'{"\\u001b[2Ja":' + ENTRY + b"}",
    "a line break in a name": b'{"a\\nerror: b":' + ENTRY + b"}",
    "a NUL in a name": b'{"a\\u0000b":' + ENTRY + b"}",
    "half a surrogate pair in a name": b'{"a\\ud800":' + ENTRY + b"}",
    "a name of a million characters": b'{"' + b"a" * 1_000_000 + b'":' + ENTRY + b"}",
    "metadata that is no object": b'{"__metadata__":[],"a":' + ENTRY + b"}",
    "metadata of numbers": b'{"__metadata__":{"format":1},"a":' + ENTRY + b"}",
    "nested metadata": b'{"__metadata__":{"format":{}},"a":' + ENTRY + b"}",
    "half a surrogate pair in metadata": b'{"__metadata__":{"format":"\\udfff"},"a":' + ENTRY + b"}",
    "metadata twice": b'{"__metadata__":{},"__metadata__":{},"a":' + ENTRY + b"}",
}

FILES: dict[str, bytes] = {
    "an HTML page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 4,
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a pickle under another name": pickle.dumps({"a": list(range(100))}),
    "a zip archive": b"PK\x03\x04" + bytes(range(200)),
    "gzip": b"\x1f\x8b\x08" + bytes(range(200)),
    "a GGUF file": b"GGUF\x03\x00\x00\x00" + bytes(200),
    "text": b"hello, world\n",
    "zeros": bytes(4096),
}
MESSAGE_OF_FILES = r"cut off|not a valid safetensors file|weights do not fit their config|no tensors"


def with_header(raw: bytes) -> Change:
    return lambda checkpoint: checkpoint.write(checkpoint.weights(), join(raw, b"\0\0\x80\x3f"))


def with_content(raw: bytes) -> Change:
    return lambda checkpoint: checkpoint.write(checkpoint.weights(), raw)


def appended(count: int) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        name = checkpoint.weights()
        checkpoint.write(name, checkpoint.read(name) + checkpoint.rng.bytes(count))

    return change


# --- single entries -----------------------------------------------------------------------------------------

Entry = dict[str, Any]


def shift(entry: Entry, begin: int, end: int) -> None:
    entry["data_offsets"] = [entry["data_offsets"][0] + begin, entry["data_offsets"][1] + end]


ENTRIES: dict[str, tuple[Callable[[Entry], object], str]] = {
    **{
        f"dtype {value!r}": (lambda entry, value=value: entry.update(dtype=value), "dtype of")
        for value in ("f32", "F33", "F32 ", "", "FLOAT32", "F4", "\ufeffF32", None, 32, ["F32"], True)
    },
    **{
        f"shape {value!r}": (lambda entry, value=value: entry.update(shape=value), "shape of|length of")
        for value in (
            None,
            "ab",
            7,
            {},
            [],
            [-1],
            [-1, -1],
            [1.0],
            [True],
            ["1"],
            [None],
            [[1]],
            [0],
            [2**62, 4],
            [2**63],
            [2**64, 0],
            [10**40],
            [2**32, 2**32],
            [1] * 33,
        )
    },
    **{
        f"offsets {value!r}": (
            lambda entry, value=value: entry.update(data_offsets=value),
            "data_offsets of|length of|hole|overlaps",
        )
        for value in (
            None,
            [],
            [0],
            [0, 4, 8],
            "0,4",
            {"0": 4},
            [0.0, 4.0],
            [False, True],
            ["0", "4"],
            [4, 0],
            [-4, 0],
            [0, -1],
            [0, 2**63],
            [2**63, 2**64],
            [10**40, 10**40 + 4],
            [0, 0],
            [[0], [4]],
        )
    },
    "reversed offsets": (lambda entry: entry["data_offsets"].reverse(), "data_offsets of"),
    "negated offsets": (
        lambda entry: entry.update(data_offsets=[-x for x in entry["data_offsets"][::-1]]),
        "data_offsets of",
    ),
    "later by an item": (lambda entry: shift(entry, 4, 4), "overlaps|hole|cut off"),
    "later by a byte": (lambda entry: shift(entry, 1, 1), "overlaps|hole|cut off"),
    "earlier by an item": (lambda entry: shift(entry, -4, -4), "overlaps|hole|data_offsets of"),
    "longer by an item": (lambda entry: shift(entry, 0, 4), "length of"),
    "shorter by an item": (lambda entry: shift(entry, 4, 0), "length of|data_offsets"),
    "far behind the end": (lambda entry: shift(entry, 2**40, 2**40), "overlaps|hole|cut off"),
    "no dtype": (lambda entry: entry.pop("dtype"), "entry"),
    "no shape": (lambda entry: entry.pop("shape"), "entry"),
    "no offsets": (lambda entry: entry.pop("data_offsets"), "entry"),
    "one field more": (lambda entry: entry.update(strides=[1]), "entry"),
    "empty": (lambda entry: entry.clear(), "entry"),
}


def with_entry(edit: Callable[[Entry], object]) -> Change:
    """Changes the entry of one tensor, drawn at random; the data stay."""

    def change(checkpoint: Checkpoint) -> None:
        name = checkpoint.weights()
        header, data = split(checkpoint.read(name))
        tensors = tensor_names(header)
        edit(header[tensors[checkpoint.rng.integers(len(tensors))]])
        checkpoint.write(name, join(header, data))

    return change


def moved(by: int, first: int) -> Change:
    """Everything from this tensor on, or one drawn at random for -1, lies some bytes later or earlier.

    The file is longer or shorter by as much, so only the hole or the overlap is wrong.
    """

    def change(checkpoint: Checkpoint) -> None:
        name = checkpoint.weights()
        header, data = split(checkpoint.read(name))
        starts = sorted(header[tensor]["data_offsets"][0] for tensor in tensor_names(header))
        start = starts[first if first >= 0 else checkpoint.rng.integers(1, len(starts))]
        for tensor in tensor_names(header):
            if header[tensor]["data_offsets"][0] >= start:
                shift(header[tensor], by, by)
        hole = checkpoint.rng.bytes(max(by, 0))
        checkpoint.write(name, join(header, data[:start] + hole + data[start + max(-by, 0) :]))

    return change


def entry_is(value: Any) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        name = checkpoint.weights()
        header, data = split(checkpoint.read(name))
        header[checkpoint.pick(*tensor_names(header))] = value
        checkpoint.write(name, join(header, data))

    return change


def all_cases() -> list[Case]:
    cases = [
        Case(f"{component} cut {name}", cut(component, where), "cut off")
        for component in WEIGHTS
        for name, where in CUTS.items()
    ]
    cases += [
        Case(f"header length {name}", length(value), "cut off|not a valid safetensors file")
        for name, value in LENGTHS.items()
    ]
    cases += [Case(f"header: {name}", with_header(raw), MESSAGE_OF_FILES) for name, raw in HEADERS.items()]
    cases += [Case(f"file: {name}", with_content(raw), MESSAGE_OF_FILES) for name, raw in FILES.items()]
    cases += [
        Case(f"{count} bytes more", appended(count), "bytes after the last tensor") for count in (1, 8, 4096)
    ]
    cases += [Case(f"entry: {name}", with_entry(edit), says) for name, (edit, says) in ENTRIES.items()]
    cases += [
        Case(f"a hole of {by} bytes{where}", moved(by, first), "leaves a hole")
        for by in (1, 4, 4096)
        for where, first in ((" at the front", 0), ("", -1))
    ]
    cases += [Case(f"tensors that share {-by} bytes", moved(by, -1), "overlaps") for by in (-1, -4)]
    cases += [
        Case(f"entry is {value!r}", entry_is(value), "entry")
        for value in (None, 1, "F32", [], ["F32", [1], [0, 4]])
    ]
    return cases


CASES = all_cases()


def test_no_two_are_the_same() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_weight_file_is_refused(
    case: Case, good_checkpoints: dict[str, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, good_checkpoints, place, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "float16", "bfloat16", "sharded"])
def test_what_is_written_anew_unchanged_converts(
    good_checkpoints: dict[str, Path], place: Path, base: str
) -> None:
    """So the refusals above are of the changes."""
    checkpoint = checkpoint_of(good_checkpoints[base], place / "source", "good")
    for file in [SHARD] if base == "sharded" else WEIGHTS.values():
        edit_tensors(file, lambda tensors, checkpoint: None)(checkpoint)
    for file in [INDEX, *JSON_FILES] if base == "sharded" else JSON_FILES:
        checkpoint.edit_json(file, lambda data: None)
    assert run(wanbuild, ["convert", str(place / "source"), "--artifact", str(place / "artifact")]) == 0
