"""A report as one page of HTML, which opens without a network: styles, script and pictures are inside.

Every text of the records is escaped here. The page's policy (CSP) names its one script and its style by their
digests, so nothing else would run even if it came into the page.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanreport import STYLE
from wanreport.report import (
    Fact,
    Facts,
    Film,
    Films,
    Lines,
    Note,
    Report,
    Section,
    Table,
    Waterfall,
)
from wanreport.tables import chart_table, image, table
from wanrun import replace_file
from wanrun.errors import unwritable

_SHORT = 32
"""Characters of a value below which two facts stand in a line."""


def write_report(path: Path, report: Report) -> None:
    """Writes a report's page atomically; it ends with the command of this process.

    Raises UsageError if it cannot be written.
    """
    repeat = Section("Repeat", (Facts((Fact("Command", command(), code=True),)),))
    try:
        page = html(replace(report, sections=(*report.sections, repeat)))
        replace_file(path, page.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise unwritable(f"the report {path}", error, "choose another --report") from error


def html(report: Report) -> str:
    """Returns the page of a report."""
    style = STYLE.read_text(encoding="utf-8")
    script = STYLE.with_name("sort.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(report.title)} – {escape(report.kind)}</title>
<style>{style}</style>
</head>
<body class="report">
<header class="top"><p class="mark">wanrun</p><p class="kind">{escape(report.kind)}</p>
<p class="made">{escape(report.made)}</p></header>
<main>
<h1>{escape(report.title)}</h1>
<p class="verdict {"good" if report.passed else "bad"}">{escape(report.verdict)}</p>
{_figures(report.figures)}
{"".join(map(_section, report.sections))}
</main>
<script>{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _figures(figures: tuple[Fact, ...]) -> str:
    return f'<dl class="figures">{"".join(map(_fact, figures))}</dl>' if figures else ""


def _fact(fact: Fact) -> str:
    value = f"<code>{escape(fact.value)}</code>" if fact.code else escape(fact.value)
    note = f'<dd class="note-of">{escape(fact.note)}</dd>' if fact.note else ""
    return f"<div><dt>{escape(fact.name)}</dt><dd>{value}</dd>{note}</div>"


def _section(section: Section) -> str:
    parts = "".join(_PARTS[type(part)](part) for part in section.parts)
    return f"<section><h2>{escape(section.title)}</h2>{parts}</section>"


def _facts(part: Facts) -> str:
    short = all(len(fact.value) < _SHORT and not (fact.code or fact.note) for fact in part.facts)
    return f'<dl class="facts{" short" if short else ""}">{"".join(map(_fact, part.facts))}</dl>'


def _note(part: Note) -> str:
    return f'<p class="{"problem" if part.tone == "bad" else "remark"}">{escape(part.text)}</p>'


def _lines(part: Lines) -> str:
    return f'<ol class="lines">{"".join(f"<li>{escape(line)}</li>" for line in part.lines)}</ol>'


def _films(part: Films) -> str:
    alone = " alone" if len(part.films) == 1 else ""
    return f'<div class="films{alone}">{"".join(map(_film, part.films))}</div>'


def _film(film: Film) -> str:
    alt, name = escape(film.alt), f' id="{escape(film.name)}"' if film.name else ""
    shown = ""
    if film.clip is not None:
        uri, still = film.clip.uri, film.poster
        poster = (
            "" if still is None else f' poster="{still.uri}" width="{still.width}" height="{still.height}"'
        )
        shown = f'<video controls loop muted playsinline src="{uri}"{poster} aria-label="{alt}"></video>'
        if film.clip.animated:
            shown = f'<img class="moving" src="{uri}" alt="{alt}">'
    if film.sheet is not None:
        kind = "sheet instead" if film.clip is not None else "sheet"
        shown += image(film.sheet, kind, f"{film.alt}: frames from the first to the last")
    note = f'<p class="remark">{escape(film.note)}</p>' if film.note else ""
    facts = f'<dl class="facts">{"".join(map(_fact, film.facts))}</dl>' if film.facts else ""
    return (
        f'<figure{name}><div class="screen">{shown}</div><figcaption><p class="title" dir="auto">'
        f"{escape(film.title)}</p>{note}{facts}</figcaption></figure>"
    )


_PARTS: Mapping[type[Any], Callable[[Any], str]] = MappingProxyType(
    {
        Facts: _facts,
        Films: _films,
        Lines: _lines,
        Note: _note,
        Table: table,
        Waterfall: chart_table,
    }
)
"""The function of each kind of part."""


def command() -> str:
    """Returns the command of this process, for a shell."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def now() -> str:
    """Returns the time, for ``Report.made``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
