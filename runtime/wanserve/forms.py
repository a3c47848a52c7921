"""Reads the body of a request, JSON or a form, into fields and files; it knows no field by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from wanserve.refusal import RefusedError

MAX_FIELDS = 200
MAX_FILES = 20
MAX_TEXT = 48 << 20
"""Bytes of a field without a file: data: URLs are such fields."""
MAX_DEPTH = 8
MAX_ITEMS = 20_000
"""Of a list or an object in JSON: twice the most timesteps."""

MAX_ENCODED = 4 << 20
"""Bytes of a form without files, whose escapes take long to read."""

_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")


@dataclass
class Form:
    """What a client has sent.

    Attributes:
        fields: values by name: of JSON as they are, of a form strings, or what ``a[b]`` and ``a[]`` make of
            them.
        files: the files of a form, with the name of the field of each.
    """

    fields: dict[str, Any]
    files: list[tuple[str, UploadFile]] = field(default_factory=list)


async def read_form(request: Request) -> Form:
    """Reads the body of a request.

    Raises:
        RefusedError: for a body that is neither JSON nor a form, or is broken or too deep.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return Form(await asyncio.to_thread(_object, await request.body()))
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        return await _form(request, kind)
    raise RefusedError(
        f"the content type {kind[:60] or 'is missing and'} is not understood; expected application/json or "
        "multipart/form-data",
        415,
        code="unsupported_media_type",
    )


def _object(body: bytes) -> dict[str, Any]:
    """Returns the object of a JSON text."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {str(error)[:100]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RefusedError(
            f"the body is not a JSON object; found {type(value).__name__}", code="invalid_json"
        )
    check_depth(value)
    if len(value) > MAX_FIELDS:
        raise RefusedError(f"the request has more than {MAX_FIELDS} fields", code="too_many_fields")
    return value


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raises RefusedError for a value that is nested too deep."""
    if isinstance(value, dict | list):
        if len(value) > MAX_ITEMS:
            raise RefusedError(
                f"a list in the request has more than {MAX_ITEMS} items", code="too_many_items"
            )
        if left == 0:
            raise RefusedError(f"the request is nested deeper than {MAX_DEPTH} levels", code="too_deep")
        for inner in value.values() if isinstance(value, dict) else value:
            check_depth(inner, left - 1)


async def _form(request: Request, kind: str) -> Form:
    if kind != "multipart/form-data" and len(await request.body()) > MAX_ENCODED:
        limit = MAX_ENCODED >> 20
        raise RefusedError(
            f"the form is larger than {limit} MB; send multipart/form-data", 413, code="too_large"
        )
    try:
        data = await request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT)
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
    return Form(nested(texts), files)


def nested(texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns the fields of a form; ``a[b]`` is the entry b of the object a, ``a[]`` an item of the list a.

    A name that comes several times is a list too.

    Raises:
        RefusedError: for a list of objects, whose parts cannot be told apart, and for a name that is both an
            object and a value.
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
            raise RefusedError(f"the request is nested deeper than {MAX_DEPTH} levels", code="too_deep")
        if "" in keys[:-1]:
            raise RefusedError(
                f"{match[1]} is a list of objects, which a form mixes up; send it as one field of JSON",
                param=match[1],
            )
        _put(fields, keys, value, match[1])
    return fields


def _put(fields: dict[str, Any], keys: list[str], value: str, whole: str) -> None:
    """Puts a value at its place among nested objects."""
    *path, last = [key for key in keys if key]
    for key in path:
        fields = fields.setdefault(key, {})
        if not isinstance(fields, dict):
            raise RefusedError(f"{whole} is given as a value and as an object", param=whole)
    there = fields.get(last)
    if isinstance(there, dict):
        raise RefusedError(f"{whole} is given as a value and as an object", param=whole)
    if there is not None:
        fields[last] = [*(there if isinstance(there, list) else [there]), value]
    else:
        fields[last] = [value] if keys[-1] == "" else value
