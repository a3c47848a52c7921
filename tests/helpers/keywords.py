"""The keywords of ``generate``, as the rows of a request say. Run as a script it writes their module anew.

PYTHONPATH=tests python tests/helpers/keywords.py
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

from wanrun.artifact.model import SolverName
from wanrun.request.schema import rows
from wanrun.rows import Row

FILE = Path(__file__).parents[2] / "runtime" / "wanrun" / "request" / "keywords.py"
PROMPTS = ("prompt", "negative_prompt")
BEGIN = '''"""The options of a generation as keywords of Python, for type checkers and editors.

tests/helpers/keywords.py writes this file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from wanrun.artifact.model import SolverName
from wanrun.request.lora import LoraChoice

File = str | os.PathLike[str]
Lora = File | Mapping[str, Any] | LoraChoice


class Options(TypedDict, total=False):
    """The fields of ``Request`` besides the prompts; None is the default. For ``**options: Unpack[Options]``.

    Behind each are the names of other tools, such as diffusers' pipelines, that are understood too.
    """

'''


def keywords() -> str:
    """The file's text."""
    options = [row for row in rows() if row.name not in PROMPTS]
    lines = (f"    {name}: {_kind(row)} | None\n" for row in options for name in (row.name, *row.also))
    return BEGIN + "".join(lines)


def _kind(row: Row) -> str:
    """The types of an option's value in Python."""
    if row.value in ("FILE", "DIR|FILE"):
        return "File | Sequence[File]" if row.many else "File"
    if row.record:  # a text, its fields, or several of these
        return "Lora | Sequence[Lora]"
    if row.choices == get_args(SolverName):  # whose names fill a line
        return "SolverName"
    if row.choices:
        return f"Literal[{', '.join(map(_quoted, row.choices))}]"
    if row.numbers:
        return f"Sequence[{row.base.__name__}]"
    if row.base is str and row.parse is not None:  # a text in a form of its own, or the values it stands for
        made = get_args(get_type_hints(row.parse)["return"])
        return f"str | Sequence[{made[0].__name__}]"
    _, _, word = row.value.partition("|")
    return (
        f"{row.base.__name__} | Literal[{_quoted(word)}]"
        if word and row.base is not str
        else row.base.__name__
    )


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    FILE.write_text(keywords(), encoding="utf-8")
