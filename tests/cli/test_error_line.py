"""An error is a line of text, or of JSON with its code and fields."""

from __future__ import annotations

from helpers.refusals import json_error
from wancli.error_line import error_line
from wanrun.errors import UsageError, field


def test_text_and_json_say_the_same() -> None:
    error = UsageError("out_of_range", f"{field('num_steps')} is\ntoo small", expected="1 or more", found=0)
    text, line = (error_line(error, "--{}".format, as_json) for as_json in (False, True))
    assert json_error(line) == {
        "code": "out_of_range",
        "exit_code": 2,
        "message": text.removeprefix("error: "),
        "expected": "1 or more",
        "found": "0",
        "options": ["--num_steps"],
    }
    assert line.isprintable() and text.isprintable()
