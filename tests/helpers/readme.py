"""The tables of the pages that are made of declarations. Run as a script it writes them anew.

PYTHONPATH=tests python tests/helpers/readme.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import click

from wancli.run import wanrun
from wanserve.route import Parameter
from wanserve.service import ROUTES

DOCS = Path(__file__).parents[2] / "docs"


def options() -> str:
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


def routes() -> str:
    """One row for each route of the server."""
    lines = ["| route | meaning | parameters |", "|---|---|---|"]
    for route in ROUTES:
        parameters = "; ".join(map(_parameter, route.parameters))
        lines.append(f"| `{route.method} {route.path}` | {_cell(route.text)} | {parameters} |")
    return "\n".join(lines) + "\n"


def _parameter(one: Parameter) -> str:
    """Its name, its values if they are few or bounded, and what it chooses."""
    schema = one.schema
    values = ", ".join(f"`{value}`" for value in schema.get("enum", ()))
    if "maximum" in schema:
        values = f"{schema['minimum']} to {schema['maximum']}"
    text = one.text[0].lower() + one.text[1:].rstrip(".")
    return f"`{one.name}`{f' ({values})' if values else ''}: {text}"


class Table(NamedTuple):
    """A table that is made.

    Attributes:
        page: the page that has it.
        made: makes it.
    """

    page: Path
    made: Callable[[], str]


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "options": Table(DOCS / "commands.md", options),
        "routes": Table(DOCS / "serving.md", routes),
    }
)
"""By the name in the comments around each."""


def parts(name: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the page after it."""
    begin = f"<!-- {name}: tests/helpers/readme.py writes this table -->\n"
    end = f"<!-- end of {name} -->\n"
    before, _, rest = TABLES[name].page.read_text(encoding="utf-8").partition(begin)
    found, _, after = rest.partition(end)
    return before + begin, found, end + after


if __name__ == "__main__":
    for name, (page, made) in TABLES.items():
        before, _, after = parts(name)
        page.write_text(before + made() + after, encoding="utf-8")
