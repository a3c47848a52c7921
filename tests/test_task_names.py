"""The runtime knows no task: its names are in no code of wanrun, only in what users read and choose."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

WANRUN = Path(__file__).parents[1] / "runtime" / "wanrun"

TASKS = frozenset({"t2v", "i2v", "flf2v", "ti2v", "vace", "animate", "s2v"})
"""What people call the tasks."""

OPTIONS = frozenset(
    {"last_image", "reference_image", "pose_video", "face_video", "background_video", "mask_video"}
)
"""Options that are some models' alone; ``image``, ``video`` and ``mask`` are words for other things too."""

MEDIA, REQUEST, SAMPLES = "artifact/media.py", "request/request.py", "replay/samples.py"
KEYWORDS, ELSEWHERE = "request/keywords.py", "request/elsewhere.py"
"""Where options may be named: the record of media, the rows of the other options, the media that a recorded
result is made from, the keywords for type checkers, which have to be written out, and what other tools call
them."""


def words(text: str) -> set[str]:
    """The words of an identifier or a string, in small letters."""
    return set(re.split(r"[^a-z0-9]+", text.lower()))


def texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every identifier and every string but the docstrings, with its line."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value, line
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, line


def sources() -> list[str]:
    return sorted(path.relative_to(WANRUN).as_posix() for path in WANRUN.rglob("*.py"))


def parsed(source: str) -> ast.Module:
    tree = ast.parse((WANRUN / source).read_text(encoding="utf-8"))
    if source in (MEDIA, REQUEST, KEYWORDS):  # rows say which models have an option, and --mode's values
        tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef | ast.If)]
    return tree


def found(wrong: Callable[[str], bool], but: Collection[str] = ()) -> list[str]:
    """The places in the sources, except those named, that have a wrong text."""
    return [
        f"{source}:{line} {text}"
        for source in sources()
        if source not in but
        for text, line in texts(parsed(source))
        if wrong(text)
    ]


@pytest.mark.slow
def test_no_task_is_named() -> None:
    assert found(lambda text: bool(words(text) & TASKS)) == []


@pytest.mark.slow
def test_no_option_of_some_models_is_named() -> None:
    assert found(OPTIONS.__contains__, but=(MEDIA, SAMPLES, ELSEWHERE)) == []


def test_what_is_looked_for_is_found() -> None:
    code = (
        'def vace_size(animate_frames):\n    """Of VACE."""\n    return model["task"] == "animate" or x.i2v'
    )
    named = {text for text, _ in texts(ast.parse(code)) if words(text) & TASKS}
    assert named == {"vace_size", "animate_frames", "animate", "i2v"}
