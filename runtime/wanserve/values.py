"""Values of fields, as JSON has them or as a form's texts."""

from __future__ import annotations

from typing import Any

import msgspec

from wanrun.errors import quoted
from wanserve.refusal import RefusedError
from wanserve.sizes import check_json


def decoded(name: str, text: str) -> Any:
    """Returns what the JSON text of a field stands for."""
    check_json(text.encode())
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise RefusedError(f"{name} is not JSON", param=name) from None


def mistyped(name: str, expected: str, value: Any) -> RefusedError:
    """Returns the error of a field that has another type."""
    return RefusedError(f"{name} has the wrong type; expected {expected}; found {quoted(value)}", param=name)


def number_of(value: Any, kind: type[int] | type[float]) -> Any:
    """Returns a text as a number if it is one; the record's check tells of others."""
    if not isinstance(value, str) or len(value) > 40:
        return value
    try:
        return kind(value)
    except ValueError:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if kind is int and number.is_integer() else number
