"""Broken safetensors and GGUF files: what is done to a good file's bytes."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Kind

Draw = np.random.Generator
Make = Callable[[Draw, bytes], bytes]
Entry = dict[str, Any]
Header = dict[str, Any]


class Row(NamedTuple):
    """One broken file: its name, its bytes from a good file's, the code, and values that are named."""

    name: str
    make: Make
    code: str
    values: tuple[object, ...] = ()


def split(raw: bytes) -> tuple[Header, bytes]:
    """Header and data of a safetensors file."""
    end = header_end(raw)
    return json.loads(raw[8:end]), raw[end:]


def join(header: Header | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def header_end(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def tensor_names(header: Header) -> list[str]:
    return sorted(name for name in header if name != "__metadata__")


def pick(draw: Draw, header: Header) -> str:
    """A tensor, drawn at random."""
    names = tensor_names(header)
    return names[draw.integers(len(names))]


# --- the file as a whole ------------------------------------------------------------------------------------


def _between_tensors(draw: Draw, raw: bytes) -> int:
    header, _ = split(raw)
    ends = sorted(header[name]["data_offsets"][1] for name in tensor_names(header))
    return header_end(raw) + int(ends[draw.integers(len(ends) - 1)])


_CUTS: dict[str, Callable[[Draw, bytes], int]] = {
    "to nothing": lambda draw, raw: 0,
    "to one byte": lambda draw, raw: 1,
    "in the length": lambda draw, raw: 7,
    "after the length": lambda draw, raw: 8,
    "in the header": lambda draw, raw: int(draw.integers(9, header_end(raw) - 1)),
    "before the header's last byte": lambda draw, raw: header_end(raw) - 1,
    "after the header": lambda draw, raw: header_end(raw),
    "after the data's first byte": lambda draw, raw: header_end(raw) + 1,
    "between tensors": _between_tensors,
    "in the data": lambda draw, raw: int(draw.integers(header_end(raw) + 2, len(raw) - 1)),
    "before the last byte": lambda draw, raw: len(raw) - 1,
}

_LENGTHS: dict[str, tuple[Callable[[bytes], int], str]] = {
    "zero": (lambda raw: 0, "unreadable"),
    "one": (lambda raw: 1, "unreadable"),
    "two": (lambda raw: 2, "unreadable"),
    "one less": (lambda raw: header_end(raw) - 9, "unreadable"),
    "one more": (lambda raw: header_end(raw) - 7, "unreadable"),
    "all that is left": (lambda raw: len(raw) - 8, "unreadable"),
    "one more than is left": (lambda raw: len(raw) - 7, "damaged"),
    "the file's": (len, "damaged"),
    "big-endian": (lambda raw: int.from_bytes(raw[:8], "big"), "unreadable"),
}

_LIMIT = 100_000_000
_TOO_LONG = (_LIMIT + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)

_OTHER_FORMS: dict[str, bytes] = {
    "an HTML page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 4,
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a pickle": pickle.dumps({"a": list(range(100))}),
    "a zip archive": b"PK\x03\x04" + bytes(range(200)),
    "gzip": b"\x1f\x8b\x08" + bytes(range(200)),
    "text": b"hello, world\n",
    "zeros": bytes(4096),
}


def _cut(where: Callable[[Draw, bytes], int]) -> Make:
    return lambda draw, raw: raw[: where(draw, raw)]


def _is(content: bytes) -> Make:
    return lambda draw, raw: content


def _longer(count: int) -> Make:
    return lambda draw, raw: raw + draw.bytes(count)


def _set(field: str, value: Any) -> Callable[[Entry], object]:
    return lambda entry: entry.update({field: value})


def _with_length(value: Callable[[bytes], int]) -> Make:
    return lambda draw, raw: struct.pack("<Q", value(raw)) + raw[8:]


def _with_number(length: int) -> Make:
    return lambda draw, raw: struct.pack("<Q", length) + raw[8:]


def _whole_files() -> Iterator[Row]:
    for name, where in _CUTS.items():
        yield Row(f"cut {name}", _cut(where), "damaged", ("bytes",))
    for name, (value, code) in _LENGTHS.items():
        yield Row(f"a header as long as {name}", _with_length(value), code)
    for length in _TOO_LONG:
        make = _with_number(length)
        yield Row(f"a header of {length} bytes", make, "unreadable", (_LIMIT, length))
    for name, content in _OTHER_FORMS.items():
        yield Row(name, _is(content), "unreadable")
    for count in (1, 8, 4096):
        yield Row(f"{count} bytes more", _longer(count), "unreadable", ("bytes",))


# --- headers ------------------------------------------------------------------------------------------------

_ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_METADATA = ("__metadata__",)
_HEADERS: dict[str, tuple[bytes, tuple[object, ...]]] = {
    "nothing": (b"", ("JSON",)),
    "an empty object": (b"{}", ()),
    "a list": (b"[]", ("JSON",)),
    "a list of objects": (b'[{"a": 1}]', ("JSON",)),
    "a string": (b'"abc"', ("JSON",)),
    "null": (b"null", ("JSON",)),
    "NUL bytes": (bytes(64), ()),
    "not UTF-8": (b'{"\xff\xfe":' + _ENTRY + b"}", ("utf-8",)),
    "UTF-16": ('{"a":1}'.encode("utf-16"), ()),
    "a byte order mark": (b"\xef\xbb\xbf{}", ()),
    "white space first": (b" {}", ()),
    "cut-off JSON": (b'{"a":{"dtype":"F32"', ()),
    "a trailing comma": (b'{"a":' + _ENTRY + b",}", ()),
    "single quotes": (b"{'a': 1}", ()),
    "no quotes": (b"{nonsense}", ()),
    "two objects": (b"{}{}", ()),
    "NaN": (b'{"a":NaN}', ("NaN",)),
    "a number of 5000 digits": (b'{"a":' + b"9" * 5000 + b"}", ()),
    "deeply nested objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, ()),
    "objects without an end": (b'{"a":' * 100_000, ()),
    "deeply nested lists": (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", ()),
    "a tensor twice": (b'{"a":' + _ENTRY + b',"a":' + _ENTRY + b"}", ("'a'",)),
    "a field twice": (
        b'{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}',
        ("'shape'",),
    ),
    "an escape sequence in a name": (b'{"\\u001b[2Ja":' + _ENTRY + b"}", ()),
    "a line break in a name": (b'{"a\\nerror: b":' + _ENTRY + b"}", ()),
    "a NUL in a name": (b'{"a\\u0000b":' + _ENTRY + b"}", ()),
    "half a surrogate pair in a name": (b'{"a\\ud800":' + _ENTRY + b"}", ()),
    "a name of a million characters": (b'{"' + b"a" * 1_000_000 + b'":' + _ENTRY + b"}", ()),
    "metadata that are a list": (b'{"__metadata__":[],"a":' + _ENTRY + b"}", _METADATA),
    "metadata that are a text": (b'{"__metadata__":"k","a":' + _ENTRY + b"}", _METADATA),
    "metadata of numbers": (b'{"__metadata__":{"format":1},"a":' + _ENTRY + b"}", _METADATA),
    "nested metadata": (b'{"__metadata__":{"format":{}},"a":' + _ENTRY + b"}", _METADATA),
    "half a surrogate pair in metadata": (b'{"__metadata__":{"format":"\\udfff"},"a":' + _ENTRY + b"}", ()),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},"a":' + _ENTRY + b"}", _METADATA),
    # What Python's json reads, and the safetensors package does not.
    "minus zero in a shape": (b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', ()),
    "minus zero in an offset": (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[-0,0]}}', ()),
    "a float in a shape": (b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', ()),
}


def _headers() -> Iterator[Row]:
    for name, (header, values) in _HEADERS.items():
        yield Row(f"a header of {name}", _is(join(header, b"\0\0\x80\x3f")), "unreadable", values)


# --- entries ------------------------------------------------------------------------------------------------


def _shift(entry: Entry, begin: int, end: int) -> None:
    entry["data_offsets"] = [entry["data_offsets"][0] + begin, entry["data_offsets"][1] + end]


def _negate(entry: Entry) -> None:
    entry["data_offsets"] = [-x for x in entry["data_offsets"][::-1]]


_DTYPES = ("f32", "F33", "F32 ", "", "FLOAT32", "F4", "\ufeffF32", None, 32, ["F32"], True)
_SHAPES: tuple[Any, ...] = (
    *(None, "ab", 7, {}, [], [-1], [-1, -1], [1.0], [True], ["1"], [None], [[1]], [0], [1] * 33),
    *([2**62, 4], [2**63], [2**64, 0], [10**40], [2**32, 2**32]),
)
_OFFSETS: tuple[Any, ...] = (
    *(None, [], [0], [0, 4, 8], "0,4", {"0": 4}, [0.0, 4.0], [False, True], ["0", "4"], [4, 0], [-4, 0]),
    *([0, -1], [0, 2**63], [2**63, 2**64], [10**40, 10**40 + 4], [0, 0], [[0], [4]]),
)
_EDITS: dict[str, Callable[[Entry], object]] = {
    "reversed offsets": lambda entry: entry["data_offsets"].reverse(),
    "negated offsets": _negate,
    "offsets later by an item": lambda entry: _shift(entry, 4, 4),
    "offsets later by a byte": lambda entry: _shift(entry, 1, 1),
    "offsets earlier by an item": lambda entry: _shift(entry, -4, -4),
    "offsets longer by an item": lambda entry: _shift(entry, 0, 4),
    "offsets shorter by an item": lambda entry: _shift(entry, 4, 0),
    "offsets far behind the end": lambda entry: _shift(entry, 2**40, 2**40),
    "33 axes": lambda entry: entry["shape"].extend([1] * (33 - len(entry["shape"]))),
    "no dtype": lambda entry: entry.pop("dtype"),
    "no shape": lambda entry: entry.pop("shape"),
    "no offsets": lambda entry: entry.pop("data_offsets"),
    "one field more": lambda entry: entry.update(strides=[1]),
    "no field": lambda entry: entry.clear(),
}


def _with_entry(edit: Callable[[Entry], object]) -> Make:
    """Changes the entry of one tensor; the data stay."""

    def make(draw: Draw, raw: bytes) -> bytes:
        header, data = split(raw)
        edit(header[pick(draw, header)])
        return join(header, data)

    return make


def _entry_is(value: Any) -> Make:
    def make(draw: Draw, raw: bytes) -> bytes:
        header, data = split(raw)
        header[pick(draw, header)] = value
        return join(header, data)

    return make


def _moved(by: int, first: int) -> Make:
    """Everything from this tensor on, or one drawn at random for -1, lies some bytes later or earlier.

    The file is longer or shorter by as much, so only the hole or the overlap is wrong.
    """

    def make(draw: Draw, raw: bytes) -> bytes:
        header, data = split(raw)
        starts = sorted(header[name]["data_offsets"][0] for name in tensor_names(header))
        start = starts[first if first >= 0 else draw.integers(1, len(starts))]
        for name in tensor_names(header):
            if header[name]["data_offsets"][0] >= start:
                _shift(header[name], by, by)
        return join(header, data[:start] + draw.bytes(max(by, 0)) + data[start + max(-by, 0) :])

    return make


def _entries() -> Iterator[Row]:
    for field, values in {"dtype": _DTYPES, "shape": _SHAPES, "data_offsets": _OFFSETS}.items():
        for value in values:
            yield Row(f"{field} {value!r}", _with_entry(_set(field, value)), "unreadable")
    for name, edit in _EDITS.items():
        yield Row(name, _with_entry(edit), "unreadable")
    for value in (None, 1, "F32", [], ["F32", [1], [0, 4]]):
        yield Row(f"an entry of {value!r}", _entry_is(value), "unreadable", ("entry",))
    for by in (1, 4, 4096):
        for where, first in (("at the front", 0), ("somewhere", -1)):
            yield Row(f"a hole of {by} bytes {where}", _moved(by, first), "unreadable", ("offset",))
    for by in (1, 4):
        yield Row(f"tensors that share {by} bytes", _moved(-by, -1), "unreadable", ("offset",))


SAFETENSORS: tuple[Row, ...] = (*_whole_files(), *_headers(), *_entries())


# --- GGUF ---------------------------------------------------------------------------------------------------

# A file of one tensor, and the fact general.architecture: 24 bytes, then the fact's name of 20 at 24.
_NAME = 24 + 8 + 20 + 4 + 8 + 3 + 8
_RANK, _SIZES, _KIND, _OFFSET = _NAME + 1, _NAME + 5, _NAME + 21, _NAME + 25


def _put(form: str, offset: int, value: int) -> Make:
    def make(draw: Draw, raw: bytes) -> bytes:
        data = bytearray(raw)
        struct.pack_into(form, data, offset, value)
        return bytes(data)

    return make


GGUF: tuple[Row, ...] = (
    Row("another version", _put("<I", 4, 9), "unreadable", ("GGUF",)),
    Row("2^63 tensors", _put("<Q", 8, 2**63), "unreadable", (200_000, 2**63)),
    Row("2^40 facts", _put("<Q", 16, 2**40), "unreadable", (2**40,)),
    Row("more facts than there are", _put("<Q", 16, 3), "unreadable"),
    Row("a name of 2^62 bytes", _put("<Q", 24, 2**62), "unreadable"),
    Row("a fact of no type", _put("<I", 24 + 28, 77), "unreadable", (77,)),
    Row("a fact of another type", _put("<I", 24 + 28, 9), "unreadable"),
    Row("99 axes", _put("<I", _RANK, 99), "unreadable", ("'b'", 8, 99)),
    Row("2^60 values", _put("<Q", _SIZES, 2**60), "unreadable", ("'b'",)),
    Row("values that fill no block", _put("<Q", _SIZES, 33), "unreadable", ("'b'", 32)),
    Row("2^20 values", _put("<Q", _SIZES, 2**20), "damaged"),
    Row("a tensor of no type", _put("<I", _KIND, 999), "unreadable", ("'b'", 999)),
    Row("a tensor of Q8_K", _put("<I", _KIND, int(Kind.Q8_K)), "wrong_kind", ("b ", "Q8_K")),
    Row("a tensor of I32", _put("<I", _KIND, int(Kind.I32)), "wrong_kind", ("b ", "I32")),
    Row("a tensor at 2^50", _put("<Q", _OFFSET, 2**50), "damaged"),
    Row("a cut in the header", lambda draw, raw: raw[:60], "unreadable"),
    Row("a cut in the data", lambda draw, raw: raw[:-60], "damaged"),
)
