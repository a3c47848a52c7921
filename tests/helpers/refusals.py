"""What a test expects of a refusal: its code, and values in its parts; docs/errors.md has the sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, WanError


@contextmanager
def refuses(
    code: ErrorCode, kind: type[WanError] = UsageError, **parts: object
) -> Iterator[pytest.ExceptionInfo[WanError]]:
    """Checks that a block raises an error with a code.

    Args:
        code: the code.
        kind: the error's class.
        parts: values that stand in ``what``, ``expected``, ``found`` or ``remedy``: names and numbers.
    """
    with pytest.raises(kind) as caught:
        yield caught
    check_refusal(caught.value, code, **parts)


def check_refusal(error: WanError, code: ErrorCode, **parts: object) -> None:
    """Checks the code of an error, and values in its parts."""
    assert error.code == code, error
    for name, value in parts.items():
        assert str(value) in str(getattr(error, name)), error


def check_json(line: str, code: str, **parts: object) -> dict[str, Any]:
    """Checks and returns the error of a line of ``--json-errors``; several values are a tuple."""
    error = json_error(line)
    assert error["code"] == code, error
    check_parts(error, **parts)
    return error


def check_parts(error: Mapping[str, Any], **parts: object) -> None:
    """Checks values in the parts of an error, by name; several values are a tuple."""
    for name, values in parts.items():
        for value in values if isinstance(values, tuple) else (values,):
            assert str(value) in str(error.get(name)), (name, value, error)


def json_error(line: str) -> dict[str, Any]:
    """Returns the error of a line that a command has printed with ``--json-errors``."""
    error: dict[str, Any] = json.loads(line)["error"]
    return error
