"""Reads the pages of reports as a browser does, without one."""

from __future__ import annotations

from html.parser import HTMLParser

from wanreport.page import html
from wanreport.report import Part, Report, Section

# fmt: off
TAGS = frozenset((
    "html", "head", "meta", "title", "style", "body", "header", "main", "section", "script", "h1", "h2", "p",
    "span", "dl", "div", "dt", "dd", "code", "ol", "li", "a", "figure", "figcaption", "img", "video", "table",
    "caption", "thead", "tbody", "tr", "th", "td", "svg", "line", "rect", "text",
))
# fmt: on
"""What a page is made of."""


class Seen(HTMLParser):
    """What is in a page.

    Attributes:
        tags: every tag with its attributes, in order.
        texts: every text by the tag that it is in.
        rows: the texts of the cells of each row of a table.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))
        if self._cell:
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of each of these tags."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        """All that a reader sees."""
        return "\n".join(text for tag, text in self.texts if tag not in ("style", "script"))


def page_of(*parts: Part, title: str = "A run", verdict: str = "made") -> str:
    """The page of a report with one section of these parts."""
    return html(Report("Report", title, verdict, True, "2026-01-01 00:00 UTC", (), (Section("All", parts),)))
