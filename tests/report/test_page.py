"""The page, its file and its pictures: texts stay texts, nothing is fetched, spans become bars."""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import io
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.pages import TAGS, Seen, page_of
from helpers.refusals import refuses
from wanreport import STYLE, pictures
from wanreport.page import now, write_report
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
    Report,
    Table,
    Waterfall,
)
from wanreport.waterfall import NARROWEST, drawing, joined, scale, seconds, ticks, waterfall
from wanrun.errors import NoSpaceError
from wanrun.media.write_video import write_video

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


def report(title: str = "A run") -> Report:
    return Report("Report of a run", title, "made", True, now())


def test_a_report_replaces_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    for title in ("first", "second \udcff"):  # a name of a file that is not UTF-8
        write_report(path, report(title))
        assert f"<h1>{title[:5]}" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", now())


def test_a_report_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/venv/bin/wanrun", "a b", "--prompt", "a <fox>'s"])
    write_report(tmp_path / "r.html", report())
    (code,) = re.findall("<code>(.*?)</code>", (tmp_path / "r.html").read_text())
    assert shlex.split(html.unescape(code)) == ["wanrun", "a b", "--prompt", "a <fox>'s"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("wanrun.files.os.fsync", full)
        with refuses("no_space", NoSpaceError, what=path, remedy="--report"):
            write_report(path, report())
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_bars_are_in_the_order_of_their_beginning() -> None:
    spans = [("denoise", 2.0, 3.0), ("import", 0.0, 1.0), ("restore vae", 1.0, 2.5), ("denoise", 3.5, 4.0)]
    chart = waterfall(spans, 4.0, [("ready", 1.5), ("first step", None)])
    assert [(bar.name, bar.loading) for bar in chart.bars] == [
        ("import", True),
        ("restore vae", True),
        ("denoise", False),
    ]
    assert chart.bars[2].intervals == ((2.0, 3.0), (3.5, 4.0)) and seconds(chart.bars[2]) == 1.5
    assert chart.marks == (("ready", 1.5),)


def test_what_lies_outside_is_cut_off() -> None:
    chart = waterfall([("early", -2.0, -1.0), ("late", 5.0, 6.0), ("long", -1.0, 9.0)], 4.0)
    assert [(bar.name, bar.intervals) for bar in chart.bars] == [("long", ((0.0, 4.0),))]


def test_intervals_that_touch_are_one() -> None:
    assert joined([(3, 4), (0, 1), (0.5, 2), (2.1, 2.5)], 0.2) == ((0, 2.5), (3, 4))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (0.07, [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]),
        (3.13, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
        (100.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (86400.0, [0.0, 20000.0, 40000.0, 60000.0, 80000.0]),
    ],
)
def test_the_scale_has_round_numbers(end: float, expected: list[float]) -> None:
    assert ticks(0.0, end) == expected
    texts = re.findall(r">([\d.e+]+) s</text>", scale(waterfall([], end)))
    assert list(map(float, texts)) == expected


def test_a_drawing_stays_inside_and_short_work_is_seen() -> None:
    chart = waterfall(
        [("decode", 9.99, 10.0), ("text", 0.0, 0.001), ("denoise", 2.0, 9.0)], 10.0, [("ready", 2.0)]
    )
    for bar in chart.bars:
        svg = drawing(chart, bar)
        (rectangle,) = re.findall(r'<rect [^>]*x="([\d.]+)%"[^>]*width="([\d.]+)%"', svg)
        left, wide = map(float, rectangle)
        assert wide >= NARROWEST and left >= 0 and left + wide <= 100.01
        assert '<line class="mark" x1="20.00%"' in svg


# Videos in all formats that wanrun writes: which are embedded, and the frames of their contact sheets.


COUNT = 7
FRAMES = np.repeat(np.arange(COUNT, dtype=np.uint8), 32 * 48 * 3).reshape(COUNT, 32, 48, 3) * 36
"""Each frame is a grey of its own."""


def opened(picture: Picture) -> Image.Image:
    kind, _, data = picture.uri.partition(",")
    assert kind == "data:image/webp;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (picture.width, picture.height)
    return image


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".webm", ".gif", ".webp", ".png", ".npy", ".frames"])
def test_every_format(tmp_path: Path, suffix: str) -> None:
    video = tmp_path / f"a{suffix}"
    write_video(FRAMES, video, 8.0, {"prompt": "a fox"})
    frames = pictures.frames_of(video)
    greys = [float(np.asarray(frame.convert("L")).mean()) for frame in frames]
    assert greys == pytest.approx([36.0 * index for index in range(COUNT)], abs=4)
    clip, note = pictures.clip(video, 1 << 20)
    if suffix in pictures.PLAYED:
        assert clip is not None and note == ""
        kind, _, data = clip.uri.partition(",")
        assert (
            kind == f"data:{pictures.PLAYED[suffix]};base64" and base64.b64decode(data) == video.read_bytes()
        )
        assert clip.animated == kind.startswith("data:image/")
    else:
        assert clip is None and f" {suffix}" in note


def test_a_contact_sheet_has_the_first_and_the_last_frame() -> None:
    sheet = opened(pictures.sheet(pictures.images(FRAMES)))
    assert sheet.width <= pictures.SHEET_WIDTH + 100
    wide, high = sheet.width / 3, sheet.height / 2
    centres = [((column + 0.5) * wide, (row + 0.5) * high) for row in range(2) for column in range(3)]
    greys = [sheet.convert("L").getpixel((int(x), int(y))) for x, y in centres]
    expected = [36 * index for index in (0, 1, 2, 4, 5, 6)]
    assert greys == pytest.approx(expected, abs=6)
    one = opened(pictures.sheet(pictures.images(FRAMES[:1])))
    assert one.height == pytest.approx(one.width * 32 / 48, abs=1)
    small = opened(pictures.still(pictures.images(FRAMES)[3], pictures.THUMBNAIL))
    assert small.width == pictures.THUMBNAIL and small.convert("L").getpixel((5, 5)) == pytest.approx(
        108, abs=4
    )


def test_large_videos_are_not_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = tmp_path / "a.gif"
    write_video(FRAMES, video, 8.0, {})
    size = video.stat().st_size
    assert pictures.clip(video, size)[0] is not None
    clip, note = pictures.clip(video, size - 1)
    assert clip is None and "too large" in note
    monkeypatch.setattr(pictures, "CLIP_BYTES", size - 1)
    assert pictures.clip(video, 1 << 30)[0] is None


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.npy", "a.png"])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_video_is_one_line(tmp_path: Path, name: str, there: bool) -> None:
    if there:
        (tmp_path / name).write_bytes(b"no video")
    with refuses("unreadable", what=tmp_path / name) as caught:
        pictures.frames_of(tmp_path / name)
    assert caught.value.found
    if there:
        assert pictures.digest(tmp_path / name) == (8, hashlib.sha256(b"no video").hexdigest())
        return
    for read in (
        lambda: pictures.clip(tmp_path / "a.mp4", 1 << 20),
        lambda: pictures.digest(tmp_path / name),
    ):
        with refuses("unreadable", what=tmp_path, found=os.strerror(errno.ENOENT)):
            read()


def test_without_ffmpeg_it_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(FRAMES, tmp_path / "a.mp4", 8.0, {})

    def missing() -> str:
        raise RuntimeError("no ffmpeg")

    monkeypatch.setattr(pictures.imageio_ffmpeg, "get_ffmpeg_exe", missing)
    with refuses("unreadable", what=tmp_path / "a.mp4", found="no ffmpeg"):
        pictures.frames_of(tmp_path / "a.mp4")


def test_a_folder_without_frames(tmp_path: Path) -> None:
    (tmp_path / "a.frames").mkdir()
    with refuses("unreadable", found="no frame"):
        pictures.frames_of(tmp_path / "a.frames")
