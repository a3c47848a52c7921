"""The page: texts stay texts, it needs nothing else, and it is the design of the server's page."""

from __future__ import annotations

import base64
import hashlib
import re

from helpers.pages import TAGS, Seen, page_of
from wanreport import STYLE
from wanreport.report import (
    Bar,
    Cell,
    Clip,
    Column,
    Fact,
    Facts,
    Film,
    Films,
    Lines,
    Note,
    Picture,
    Table,
    Waterfall,
)

HOSTILE = "\"'></script></style></title><img onerror=alert(1) src=x><script>alert(1)</script>&amp;\u202e"
PICTURE = Picture("data:image/webp;base64,AAAA", 4, 3)


def everything(text: str) -> str:
    """A page in which each place for a text has this one."""
    fact = Fact(text, text, note=text)
    cell = Cell(text, detail=text, link=text, picture=PICTURE, tone="bad")
    clips = (None, Clip("data:video/mp4;base64,AAAA", False), Clip("data:image/gif;base64,AAAA", True))
    return page_of(
        Facts((fact, Fact(text, text, code=True))),
        Films(tuple(Film(text, text, PICTURE, clip, PICTURE, text, (fact,), text) for clip in clips)),
        Films((Film(text, text, None, note=text),)),
        Table(text, (Column(text), Column(text, numeric=True)), ((cell, cell), (cell, cell))),
        Waterfall((Bar(text, ((0.0, 1.0),), True),), 0.0, 2.0, ((text, 1.0),)),
        Note(text, "bad"),
        Lines((text,)),
        title=text,
        verdict=text,
    )


def test_hostile_texts_stay_texts() -> None:
    seen, plain = Seen(everything(HOSTILE)), Seen(everything("plain"))
    assert [tag for tag, _ in seen.tags] == [tag for tag, _ in plain.tags]
    assert {tag for tag, _ in seen.tags} <= TAGS
    assert seen.text.count(HOSTILE) == plain.text.count("plain") > 15
    attributes = [set(attributes) for _, attributes in seen.tags]
    assert attributes == [set(attributes) for _, attributes in plain.tags]
    assert not any(name.startswith("on") or name == "style" for names in attributes for name in names)


def test_nothing_is_fetched() -> None:
    seen = Seen(everything("a fox"))
    sources = [
        value for _, found in seen.tags for name, value in found.items() if name in ("src", "href", "poster")
    ]
    assert len(sources) > 5 and all(source.startswith(("data:", "#")) for source in sources)
    assert not {"link", "iframe", "base", "form", "object"} & {tag for tag, _ in seen.tags}
    (style,) = [text for tag, text in seen.texts if tag == "style" and len(text) > 100]
    assert "@import" not in style
    assert all(url.startswith('"data:') for url in re.findall(r"url\(([^)]{6})", style))


def test_the_policy_names_the_script_and_the_style() -> None:
    seen = Seen(everything("a fox"))
    (policy,) = [
        one["content"] for one in seen.all("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = [text for name, text in seen.texts if name == tag and len(text) > 100]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_design_has_each_value_once() -> None:
    """Light and dark beside one another, and all of it in the page."""
    style = STYLE.read_text()
    assert style in everything("a fox")
    values = re.findall(r"^ +(--[\w-]+):", style, re.M)
    assert set(re.findall(r"var\((--[\w-]+)", style)) - {"--aspect"} <= set(values)
    colours = [line for line in style.splitlines() if re.search("#[0-9a-f]{3,8}", line)]
    assert all(line.lstrip().startswith("--") for line in colours)


def test_a_reader_finds_a_way() -> None:
    """Headings in order, captions, names of rows and columns, and texts for pictures."""
    seen = Seen(everything("a fox"))
    assert [tag for tag, _ in seen.tags if re.fullmatch("h[1-6]", tag)] == ["h1", "h2"]
    assert len(seen.all("caption")) == len(seen.all("table")) == 2
    assert all(one["scope"] in ("row", "col") for one in seen.all("th"))
    pictures = [one for one in seen.all("img") if one["class"] != "small"]
    assert len(pictures) == 4 and all("a fox" in one["alt"] for one in pictures)
    assert all(one["alt"] == "" for one in seen.all("img") if one["class"] == "small")
    assert [one["aria-label"] for one in seen.all("video")] == ["a fox"]


def test_keys_to_sort_by_are_numbers() -> None:
    rows = tuple((Cell("a"), Cell(text, key)) for text, key in (("1.5 s", 1.5), ("", None)))
    page = page_of(Table("t", (Column("name"), Column("took", True)), rows))
    seen = Seen(page)
    assert [one.get("data-key") for one in seen.all("td")] == ["1.5", None]
    assert [one["class"] for one in seen.all("table")] == ["sortable"]
    single = Seen(page_of(Table("t", (Column("name"), Column("took", True)), rows[:1])))
    assert [one["class"] for one in single.all("table")] == ["plain"]  # nothing to sort
