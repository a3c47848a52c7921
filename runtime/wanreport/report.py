"""The content of a report: sections of facts, tables, pictures, a waterfall and lines, all plain text.

The records know no HTML. ``wanreport.page`` escapes every text in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["", "good", "bad", "soft"]


@dataclass(frozen=True)
class Fact:
    """One named value, with a note in small letters.

    ``code`` is whether the value is a digest, a path or a command.
    """

    name: str
    value: str
    note: str = ""
    code: bool = False


@dataclass(frozen=True)
class Facts:
    """Named values side by side."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Picture:
    """A still picture: its bytes as a data URI, and its size in pixels."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Clip:
    """A video that a browser plays, as a data URI; ``animated`` if for browsers it is a picture, as a GIF."""

    uri: str
    animated: bool


@dataclass(frozen=True)
class Film:
    """A video.

    Attributes:
        title: the user's text, such as the prompt.
        alt: what the pictures are, for people who do not see them.
        sheet: some of its frames side by side; None if it cannot be read.
        clip: the video itself; None if no browser plays it, or if it is too large.
        poster: its first frame, which is seen until it plays.
        note: why there is no sheet, or no clip.
        facts: shown below it.
        name: of its place in the page, for links.
    """

    title: str
    alt: str
    sheet: Picture | None
    clip: Clip | None = None
    poster: Picture | None = None
    note: str = ""
    facts: tuple[Fact, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Films:
    """Videos side by side."""

    films: tuple[Film, ...]


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are aligned at their ends."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        key: the number to sort by; None to sort by the text.
        detail: a second line, such as an error.
        link: the name of a film.
        picture: a small picture in front of the text, which says nothing more.
    """

    text: str
    key: float | None = None
    tone: Tone = ""
    detail: str = ""
    link: str = ""
    picture: Picture | None = None


@dataclass(frozen=True)
class Table:
    """A table. The first cell of a row names it.

    ``caption`` says what the rows are, and what they are compared with. A reader may sort it by a column if
    ``sortable``.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = True


@dataclass(frozen=True)
class Bar:
    """A row of a waterfall: disjoint (start, end) intervals, in seconds.

    ``loading`` is whether it reads or prepares; otherwise it computes or writes.
    """

    name: str
    intervals: tuple[tuple[float, float], ...]
    loading: bool


@dataclass(frozen=True)
class Waterfall:
    """When each part of a run took place, in seconds; ``marks`` are moments by name."""

    bars: tuple[Bar, ...]
    begin: float
    end: float
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Note:
    """A paragraph; a ``bad`` one is an error."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Lines:
    """The output of a command, line by line."""

    lines: tuple[str, ...]


Part = Facts | Films | Table | Waterfall | Note | Lines


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        kind: its subject, such as ``Report of a run``.
        title: its heading.
        verdict: the outcome, in one sentence.
        passed: whether the outcome is the wanted one.
        made: when, as ``2026-11-26 11:41 UTC``.
        figures: the most important values.
    """

    kind: str
    title: str
    verdict: str
    passed: bool
    made: str
    figures: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = field(default=())
