"""The HTML of tables and time lines, and of the pictures in their cells."""

from __future__ import annotations

from html import escape

from wanreport.report import Cell, Column, Picture, Table, Waterfall
from wanreport.waterfall import drawing, scale, seconds


def image(picture: Picture, kind: str, alt: str) -> str:
    """Returns the element of a picture."""
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<img class="{kind}" src="{picture.uri}" {size} alt="{escape(alt)}">'


def table(part: Table) -> str:
    """Returns the element of a table."""
    heads = "".join(
        f'<th scope="col"{_numeric(column)}>{escape(column.name)}</th>' for column in part.columns
    )
    rows = "".join(f"<tr>{''.join(map(_cell, part.columns, row, range(len(row))))}</tr>" for row in part.rows)
    kind = "sortable" if part.sortable and len(part.rows) > 1 else "plain"
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(part.caption)}">'
        f'<table class="{kind}"><caption>{escape(part.caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _numeric(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _cell(column: Column, cell: Cell, place: int) -> str:
    text = escape(cell.text)
    if cell.link:
        text = f'<a href="#{escape(cell.link)}">{text}</a>'
    if cell.tone:
        text = f'<span class="{cell.tone}">{text}</span>'
    if cell.picture is not None:
        text = f'<span class="with-picture">{image(cell.picture, "small", "")}<span>{text}</span></span>'
    if cell.detail:
        text += f'<span class="detail">{escape(cell.detail)}</span>'
    key = "" if cell.key is None else f' data-key="{cell.key!r}"'
    tag, scope = ("td", "") if place else ("th", ' scope="row"')
    return f'<{tag}{scope}{_numeric(column)}{key} dir="auto">{text}</{tag}>'


def chart_table(chart: Waterfall) -> str:
    """Returns the table of a time line, with a drawing in each row."""
    rows = "".join(
        f'<tr><th scope="row">{escape(bar.name)}</th><td>{drawing(chart, bar)}</td>'
        f'<td class="number">{seconds(bar):.2f} s</td></tr>'
        for bar in chart.bars
    )
    marks = "; ".join(f"{escape(name)} after {at:.2f} s" for name, at in chart.marks)
    dashed = f'<span class="key mark">{marks}</span>' if marks else ""
    return (
        '<table class="waterfall">'
        "<caption>When each part took place, in seconds since the process started. "
        '<span class="keys"><span class="key loading">loading</span> '
        f'<span class="key work">computing and writing</span> {dashed}</span></caption>'
        '<thead><tr><th scope="col">Part</th><th scope="col">'
        f'<span class="visually-hidden">When</span>{scale(chart)}</th>'
        f'<th scope="col" class="number">Took</th></tr></thead><tbody>{rows}</tbody></table>'
    )
