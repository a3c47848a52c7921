"""Reports in a real browser: Debian's Chromium, driven by Playwright, with axe-core for who cannot see them.

With ``WAN_REPORT_ARTIFACT=artifacts/demo/artifact WAN_REPORT_SHOTS=docs/reports`` in the environment, after
``make demo``, it writes the screenshots of docs/commands.md: run it in the repository's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from helpers.browser import IN_A_BROWSER, chromium, plays
from helpers.elsewhere import put_golden
from helpers.fake_pipeline import run_here, write_lines
from wanbuild.check import verify
from wanbuild.cli import wanbuild
from wancli.console import run
from wanreport.page import html
from wanreport.report import Report, Section
from wanreport.waterfall import waterfall

ARTIFACT, SHOTS = os.environ.get("WAN_REPORT_ARTIFACT"), os.environ.get("WAN_REPORT_SHOTS")
PROMPTS: tuple[Mapping[str, Any], ...] = (
    {"prompt": "a red ball rolls to the right over green ground", "seed": 1},
    {"prompt": "a big blue star grows on striped grey ground", "seed": 2, "num_steps": 20},
    {"prompt": "a yellow square moves down over speckled blue ground", "seed": 4, "num_steps": 40},
    {"prompt": "a white ball goes round in a circle over checked black ground", "seed": 5, "frames": 21},
    {"prompt": "a small green triangle rolls to the left over brown ground", "seed": 6, "num_steps": 10},
)

pytestmark = [pytest.mark.thorough, *IN_A_BROWSER]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def reports(
    artifact: Path,
    golden: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    cli: Any,
) -> dict[str, Path]:
    """The pages of one video, of several prompts and of a verification."""
    pages = {name: tmp_path / f"{name}.html" for name in ("run", "prompts", "verify")}
    if ARTIFACT is None:
        request.getfixturevalue("fake")
        put_golden(artifact, golden)
        monkeypatch.setattr(verify, "check_all", lambda artifact, say: say("the weights are whole"))
    steps, made = (2, tmp_path) if ARTIFACT is None else (30, Path("artifacts/demo/reports"))
    made.mkdir(exist_ok=True)
    file, common = write_lines(made / "prompts.jsonl", *PROMPTS), ("--steps", steps, "--overwrite")
    one = ("--prompt", PROMPTS[0]["prompt"], "--output", made / "ball.mp4", "--report", pages["run"])
    several = ("--prompts", file, "--output", made / "out.mp4", "--report", pages["prompts"])
    for arguments, code in ((one, 0), (several, 3)):  # 21 frames are not built
        if ARTIFACT is None:
            assert run_here(capsys, artifact, *common, *arguments).code == code
        else:
            assert cli("wanrun", ARTIFACT, *common, *arguments).returncode == code
    if ARTIFACT is None:
        assert run(wanbuild, ["verify", str(artifact), "--report", str(pages["verify"])]) == 0
    else:
        source = ("--source", "artifacts/tiny/wan2.1-t2v")
        cli.succeeds("wanbuild", "verify", ARTIFACT, *source, "--report", pages["verify"])
    return pages


def shown(browser: Browser, file: Path, check: Callable[[Page], None], **how: Any) -> None:
    """Opens a page, in which nothing may go wrong or be fetched, and looks at it."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
    page, problems, fetched = context.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(file.as_uri())
    check(page)
    assert problems == []
    assert [url for url in fetched if not url.startswith("data:")] == [file.as_uri()]
    context.close()


def fits(page: Page) -> None:
    """Looks at the page as a screen reader does, and at its width."""
    found = Axe().run(page)["violations"]
    assert [(item["id"], [node["html"][:200] for node in item["nodes"]]) for item in found] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_reports(browser: Browser, reports: dict[str, Path]) -> None:
    """Every page on a wide screen, in the dark, on a telephone and on paper; a table is sorted."""
    for name, file in reports.items():
        for how in ({}, {"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 800}}):
            shown(browser, file, fits, **how)
        shown(browser, file, on_paper, viewport={"width": 690, "height": 900}, color_scheme="dark")
        if SHOTS is not None:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            shown(browser, file, lambda page, name=name: shoot(page, Path(SHOTS) / f"{name}.png"))  # type: ignore[misc]
    shown(browser, reports["prompts"], sorts)
    shown(browser, reports["run"], told_to_play)


def test_a_run_of_hours_fits_a_telephone(browser: Browser, tmp_path: Path) -> None:
    spans = [("executables encode_text_64", 0.0, 31520.3), ("denoise", 31500.3, 31523.4)]
    chart = waterfall(spans, 31523.45, [("ready to denoise", 31523.1)])
    sections = (Section("Time", (chart,)),)
    report = Report("Report of a run", "A run", "The video was made", True, "2026", (), sections)
    (tmp_path / "run.html").write_text(html(report), encoding="utf-8")
    shown(browser, tmp_path / "run.html", fits, viewport={"width": 360, "height": 800})


def on_paper(page: Page) -> None:
    """Light, and nothing wider than the sheet; the contact sheet takes the place of the video."""
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(25, 25, 24)"
    parts = "[...document.querySelectorAll('main :not(.visually-hidden)')]"
    clips = "one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'visible'"
    assert page.evaluate(f"{parts}.filter(one => {clips}).length") == 0
    assert page.evaluate(f"Math.max(...{parts}.map(one => one.getBoundingClientRect().right))") <= 690.5
    assert not page.locator("video").first.is_visible()
    assert page.locator(".sheet").count() == 0 or page.locator(".sheet").first.is_visible()


def sorts(page: Page) -> None:
    """By the keyboard: up, then down; rows without a number are the last ones either way."""
    head, steps = page.locator("th", has_text="Steps"), [row.get("num_steps") for row in PROMPTS]
    given = [str(step) for step in steps if step is not None]

    def column() -> list[str]:
        index = head.evaluate("one => one.cellIndex")
        return page.locator(f".sortable tbody tr > :nth-child({index + 1})").all_inner_texts()

    before = column()
    assert [text for text in before if text in given] == given
    head.locator("button").focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        numbers = [int(text) for text in column() if text]
        assert numbers == sorted(numbers, reverse=order == "descending") and sorted(column()) == sorted(
            before
        )
    took = page.locator(".sortable th", has_text="Took")
    took.locator("button").click()
    assert head.get_attribute("aria-sort") == "none" and took.get_attribute("aria-sort") == "ascending"
    fits(page)


def told_to_play(page: Page) -> None:
    video = page.locator("video")
    video.evaluate("one => one.play()")
    assert plays(video)


def shoot(page: Page, file: Path) -> None:
    """Keeps a picture of a page; of a table one that is sorted."""
    if (took := page.locator(".sortable th", has_text="Took")).count():
        for _ in range(2):
            took.locator("button").click()
    page.wait_for_timeout(1500)  # until the videos show their first frames
    page.screenshot(path=file, full_page=True)
