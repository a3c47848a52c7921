"""The tables of the pages that are made of declarations. Run as a script it writes them anew.

PYTHONPATH=tests python tests/helpers/readme.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import click

from wanbuild.build_options import recipe_rows
from wanbuild.cli import wanbuild
from wanbuild.convert_options import default_rows
from wancli.run import wanrun
from wanrun.rows import Row
from wanserve.route import RouteParameter
from wanserve.service import ROUTES

DOCS = Path(__file__).parents[2] / "docs"


EVERYWHERE = ("artifact", "debug", "json_errors")
"""Options of nearly all commands of ``wanbuild``, which its table leaves out."""

_NUMBERS = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def options() -> str:
    """One row for each option of ``wanrun``."""
    return _table(("option", "meaning", "default"), _cells(wanrun, ("version",)))


def options_of_wanbuild() -> str:
    """One row for each option of each command of ``wanbuild``."""
    rows = (
        (f"`{name}`", *cells)
        for name, command in sorted(wanbuild.commands.items())
        for cells in _cells(command, EVERYWHERE)
    )
    return _table(("command", "option", "meaning", "default"), rows)


def _cells(command: click.Command, left_out: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """The option, the meaning and the default of each option of a command."""
    for param in command.params:
        if isinstance(param, click.Option) and param.name not in left_out:
            help, _, default = (param.help or "").partition("[default: ")
            default = default.removesuffix("]")
            if param.show_default:
                default = str(param.default)
            yield f"`{_spelled(param)}`", _cell(help.strip()), _cell(_code(param, default))


def _spelled(param: click.Option) -> str:
    """The flag, and what its value is called."""
    if param.is_flag:
        return "/".join([param.opts[0], *param.secondary_opts])
    choices = "|".join(param.type.choices) if isinstance(param.type, click.Choice) else ""
    value = param.metavar or choices or _NUMBERS.get(param.type.name, param.type.name)
    return _cell(f"{max(param.opts, key=len)} {value.upper() if value in ('path', 'text') else value}")


def _code(param: click.Option, default: str) -> str:
    """A default in words as it is, and a value as code."""
    choices = param.type.choices if isinstance(param.type, click.Choice) else ()
    return f"`{default}`" if default and (param.show_default or default in choices) else default


def _cell(text: str) -> str:
    """Text in a cell: flags as code, and no bar that would end it."""
    if not text.startswith("--"):
        text = re.sub(r"(?<![`\w])(--[a-z][a-z0-9-]*)", r"`\1`", text)
    return text.replace("|", "\\|")


def fields(section: str) -> str:
    """One row for each option of a section of a recipe."""
    return _table(("field", "value", "default"), map(_field, recipe_rows(section)))


def defaults() -> str:
    """One row for each default of a generation that a recipe may have."""
    return _table(("field", "value"), (_field(row)[:2] for row in default_rows().values()))


def _field(row: Row) -> tuple[str, str, str]:
    """The field of a recipe, its value and its default."""
    keys = {other.flag: other.key for name in ("convert", "compile") for other in recipe_rows(name)}
    keys |= {other.flag: key for key, other in default_rows().items()}
    help = re.sub(r"Repeatable: |; repeatable|Repeatable", "", row.help).strip(". ")
    help = re.sub(r"--[a-z][a-z0-9-]*", lambda found: f"`{keys.get(found[0], found[0])}`", help)
    if not help[1:2].isupper():
        help = help[:1].lower() + help[1:]
    default = f'`"{row.default}"`' if row.default in row.choices else row.default
    if row.base is bool and not row.many:
        default = f"`{str(row.opposite).lower()}`"
    return f"`{row.key}`", ": ".join(filter(None, [_kind(row), help])).replace("|", "\\|"), default


def _kind(row: Row) -> str:
    """The value's form in words."""
    texts = [f'`"{choice}"`' for choice in row.choices] or [f'`"{row.value}"`']
    one = " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    if (row.base in (int, float) and row.parse is None) or row.numbers:
        one = "numbers" if row.many or row.numbers else "a number"
    if row.base is bool:
        one = "`true` and `false`" if row.many else "`true` or `false`"
    return f"a list of {one}" if row.many or row.numbers else one


def routes() -> str:
    """One row for each route of the server."""
    lines = ["| route | meaning | parameters |", "|---|---|---|"]
    for route in ROUTES:
        parameters = "; ".join(map(_parameter, route.parameters))
        lines.append(f"| `{route.method} {route.path}` | {_cell(route.text)} | {parameters} |")
    return "\n".join(lines) + "\n"


def _parameter(one: RouteParameter) -> str:
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
        "options of wanbuild": Table(DOCS / "commands.md", options_of_wanbuild),
        "fields of convert": Table(DOCS / "recipes.md", partial(fields, "convert")),
        "fields of convert.defaults": Table(DOCS / "recipes.md", defaults),
        "fields of compile": Table(DOCS / "recipes.md", partial(fields, "compile")),
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
