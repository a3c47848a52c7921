"""docs/errors.md has the codes and the words of all errors, so that a change of one is seen in review."""

from __future__ import annotations

import ast

import pytest

from helpers.messages import FILE, OTHERS, Messages, messages

SOURCE = """
REMEDY = "look again"

class UsageError(WanError): ...

class LostError(UsageError):
    def __init__(self, name):
        super().__init__("lost", f"{name} is lost", remedy=REMEDY)

def refused(what, found=None):
    return UsageError("unfit", f"artifact {what}", found=found, expected="one" if found else "none")

def check(name, problems):
    problem = f"in {name}" if problems else "a link"
    problems.append(f"{name} is odd")
    raise refused(problem, found="a socket")
    raise LostError(name)
    raise RefusedError("many", 429, code="full")
    raise OSError("no word for a user")
"""


@pytest.mark.thorough
def test_the_file_is_what_the_source_says() -> None:
    """After a change of a message: PYTHONPATH=tests python tests/helpers/messages.py"""
    assert FILE.read_text(encoding="utf-8").splitlines() == messages().splitlines()


def test_words_are_found_wherever_they_are_given() -> None:
    found = Messages([ast.parse(SOURCE)]).by_code()
    assert {code: [text.split("; ") for text in texts] for code, texts in found.items()} == {
        "full": [["many [HTTP 429]"]],
        "lost": [["{} is lost", "look again"]],
        OTHERS: [["{} is odd"]],
        "unfit": [["(in {}|a link)", "found a socket"], ["artifact {}", "expected (one|none)", "found {}"]],
    }
