"""Reads the body of a request, JSON or a form, into fields and files; it knows no field by name."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any
from urllib.parse import parse_qsl

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from wanserve.refusal import RefusedError
from wanserve.sizes import MAX_DEPTH, check_json, check_plain, plain_bytes

FORM_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")
"""The media types of forms; only the first one has files."""

MAX_FIELDS = 200
MAX_FILES = 20
MAX_TEXT = 48 << 20
"""Bytes of a field without a file: data: URLs are such fields."""
MAX_ENCODED = 3 << 20
"""Bytes of a form without files, whose escapes take long to read."""

CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1")
"""In which forms are read. Python has others that make invalid texts, and codecs of other things."""

SHORT = 1 << 12
"""Bytes of JSON that are decoded at once: the way to another thread takes longer."""

_BLOCK = 1 << 16

_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")


@dataclass
class RequestBody:
    """What a client has sent.

    ``fields`` are values by name: of JSON as they are, of a form strings, or what ``a[b]`` and ``a[]`` make
    of them. ``files`` are those of a form, each with the name of its field.
    """

    fields: dict[str, Any]
    files: list[tuple[str, UploadFile]] = field(default_factory=list)


async def read_form(request: Request, file: IO[bytes]) -> RequestBody:
    """Reads the body of a request from ``file``; its headers say what the body is.

    Raises RefusedError for a body that is neither JSON nor a form, or is broken, too large or too deep.
    """
    written, options = parse_options_header(request.headers.get("content-type", ""))
    kind = written.decode("latin-1").strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        short = file.seek(0, io.SEEK_END) <= SHORT
        return RequestBody(_object(file) if short else await asyncio.to_thread(_object, file))
    if kind not in FORM_TYPES:
        raise RefusedError(
            f"the content type {kind[:60] or 'is missing and'} is not understood",
            415,
            expected="application/json or multipart/form-data",
            code="unsupported_media_type",
        )
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in CHARSETS:
        raise RefusedError(
            f"the charset {charset[:20]!r} is not understood", code="invalid_form", expected="utf-8"
        )
    texts, files = await (_parts(request, file) if kind.startswith("multi") else _pairs(file))
    await asyncio.to_thread(_check_texts, texts)
    return RequestBody(nested(texts), files)


def _object(file: IO[bytes]) -> dict[str, Any]:
    """Returns the object of a JSON text."""
    file.seek(0)
    body = file.read()
    check_json(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {str(error)[:100]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RefusedError("the body is not a JSON object", code="invalid_json", found=type(value).__name__)
    if len(value) > MAX_FIELDS:
        expected, found = f"at most {MAX_FIELDS}", str(len(value))
        what = "the request has too many fields"
        raise RefusedError(what, code="too_many_fields", expected=expected, found=found)
    return value


def _check_texts(texts: Sequence[tuple[str, str]]) -> None:
    """Raises RefusedError for fields that are too large together, files apart."""
    plain = 0
    for name, value in texts:
        plain += len(name.encode()) + plain_bytes(value.encode())
    check_plain(plain)


async def _pairs(file: IO[bytes]) -> tuple[list[tuple[str, str]], list[tuple[str, UploadFile]]]:
    """Returns the fields of a form without files."""
    if len(body := file.read(MAX_ENCODED + 1)) > MAX_ENCODED:
        limit = MAX_ENCODED >> 20
        raise RefusedError(
            "the form is too large",
            413,
            code="too_large",
            expected=f"at most {limit} MB",
            remedy="send multipart/form-data",
        )
    read = partial(parse_qsl, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    try:
        return await asyncio.to_thread(read, body.decode("latin-1")), []
    except ValueError as error:
        raise RefusedError(f"the form cannot be read: {error}", code="invalid_form") from None


async def _parts(
    request: Request, file: IO[bytes]
) -> tuple[list[tuple[str, str]], list[tuple[str, UploadFile]]]:
    """Returns the fields and the files of a form of parts."""

    async def receive() -> Message:
        block = await asyncio.to_thread(file.read, _BLOCK)
        return {"type": "http.request", "body": block, "more_body": bool(block)}

    again = Request(request.scope, receive)
    try:
        data = await again.form(max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT)
    except HTTPException as error:  # Starlette's for a form that is broken or has too many parts
        raise RefusedError(f"the form cannot be read: {error.detail}", code="invalid_form") from None
    except (ValueError, KeyError, RuntimeError) as error:
        what = type(error).__name__
        raise RefusedError(f"the form cannot be read: {what}", code="invalid_form") from None
    texts, files = list[tuple[str, str]](), list[tuple[str, UploadFile]]()
    for name, value in data.multi_items():
        if isinstance(value, UploadFile):
            files.append((name, value))
        else:
            texts.append((name, value))
    return texts, files


def nested(texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns the fields of a form; ``a[b]`` is the entry b of the object a, ``a[]`` an item of the list a.

    A name that comes several times is a list too. Raises RefusedError for a list of objects, whose parts
    cannot be told apart, and for a name that is both an object and a value.
    """
    fields = dict[str, Any]()
    for name, value in texts:
        match = _NAME.fullmatch(name)
        if match is None:
            raise RefusedError(
                f"the field {name[:60]!r} has no name that is understood", code="unknown_parameter"
            )
        keys = [match[1], *re.findall(r"\[([^\[\]]*)\]", match[2])]
        if len(keys) > MAX_DEPTH:
            expected = f"at most {MAX_DEPTH} levels"
            raise RefusedError("the request is nested too deep", code="too_deep", expected=expected)
        if "" in keys[:-1]:
            raise RefusedError(
                f"{match[1]} is a list of objects, which a form mixes up",
                param=match[1],
                remedy="send it as one field of JSON",
            )
        _put(fields, keys, value, match[1])
    return fields


def _put(fields: dict[str, Any], keys: list[str], value: str, whole: str) -> None:
    """Puts a value at its place among nested objects."""
    *path, last = [key for key in keys if key]
    for key in path:
        fields = fields.setdefault(key, {})
        if not isinstance(fields, dict):
            raise RefusedError(f"{whole} is given as a value and as an object", param=whole, code="conflict")
    there = fields.get(last)
    if isinstance(there, dict):
        raise RefusedError(f"{whole} is given as a value and as an object", param=whole, code="conflict")
    if there is not None:
        fields[last] = [*(there if isinstance(there, list) else [there]), value]
    else:
        fields[last] = [value] if keys[-1] == "" else value
