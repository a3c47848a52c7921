"""The table of wanrun's options in docs/commands.md. Run as a script it writes the table anew.

PYTHONPATH=tests python tests/helpers/readme.py
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from wancli.run import wanrun

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
BEGIN, END = "<!-- options: tests/helpers/readme.py writes this table -->\n", "<!-- end of options -->\n"


def table() -> str:
    """One row for each option of ``wanrun``."""
    lines = ["| option | meaning | default |", "|---|---|---|"]
    for param in wanrun.params:
        if isinstance(param, click.Option) and param.name != "version":
            help, _, default = (param.help or "").partition("  [default: ")
            default = default.removesuffix("]")
            if param.show_default:
                default = str(param.default)
            lines.append(f"| `{_spelled(param)}` | {_cell(help)} | {_cell(_code(param, default))} |")
    return "\n".join(lines) + "\n"


def _spelled(param: click.Option) -> str:
    """The flag, and what its value is called."""
    if param.is_flag:
        return param.opts[0]
    if isinstance(param.type, click.Choice):
        value = "|".join(param.type.choices)
    else:
        value = param.metavar or {"integer": "N", "float": "X", "text": "TEXT"}.get(param.type.name, "PATH")
    return _cell(f"{param.opts[0]} {value}")


def _code(param: click.Option, default: str) -> str:
    """A default in words as it is, and a value as code."""
    choices = param.type.choices if isinstance(param.type, click.Choice) else ()
    return f"`{default}`" if default and (param.show_default or default in choices) else default


def _cell(text: str) -> str:
    """Text in a cell: flags as code, and no bar that would end it."""
    if not text.startswith("--"):
        text = re.sub(r"(?<![`\w])(--[a-z][a-z0-9-]*)", r"`\1`", text)
    return text.replace("|", "\\|")


def parts(text: str) -> tuple[str, str, str]:
    """The page before its table, the table, and the page after it."""
    before, _, rest = text.partition(BEGIN)
    found, _, after = rest.partition(END)
    return before + BEGIN, found, END + after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + after, encoding="utf-8")
