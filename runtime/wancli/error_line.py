"""The line of a command's error: for a person, or with ``--json-errors`` for a program."""

from __future__ import annotations

__all__ = ["JSON_ERRORS", "JSON_ERRORS_HELP", "error_line"]

import json
from collections.abc import Callable
from typing import Final

from wanrun.errors import WanError

JSON_ERRORS: Final = "--json-errors"
"""The option of every command; ``wancli.console`` looks for it."""

JSON_ERRORS_HELP: Final = "Print errors as JSON, with code and fields."


def error_line(error: WanError, spell: Callable[[str], str], as_json: bool) -> str:
    """Returns the line of an error.

    Args:
        error: the error.
        spell: returns the name of an option for whom the line is for; see ``WanError.spelled``.
        as_json: whether it is an object with ``code``, ``exit_code``, ``message``, ``options``, and those of
            ``expected``, ``found`` and ``remedy`` that the message has.
    """
    message = " ".join(error.spelled(spell).split())
    if not as_json:
        return f"error: {message}"
    facts = {"code": error.code, "exit_code": error.exit_code, "message": message, **error.words(spell)}
    return json.dumps({"error": {**facts, "options": list(map(spell, error.fields))}}, ensure_ascii=False)
