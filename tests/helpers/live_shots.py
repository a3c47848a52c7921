"""Writes the pictures of a live video on the page: as it is asked for, as it plays, and after another prompt.

As a program: ``PYTHONPATH=tests:benchmarks python tests/helpers/live_shots.py ARTIFACT FOLDER PROMPT NEXT``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from helpers.browser import chromium
from serve_client import served

SECONDS = 3
"""That it plays before a picture is taken, from the first frame of each prompt on."""


def take(page: Page, folder: Path, prompt: str, following: str) -> None:
    """Makes a live video on the page, steers and stops it; writes a picture of each state."""
    expect(page.locator("#ready")).to_have_text("Ready", timeout=60_000)
    page.check("#play-live")
    page.fill("#prompt", prompt)
    page.screenshot(path=folder / "live-asked.png")
    page.click("#submit")
    expect(page.locator("#live-title")).to_have_text("Live", timeout=60_000)
    page.wait_for_timeout(SECONDS * 1000)
    page.screenshot(path=folder / "live-playing.png")
    page.fill("#next-prompt", following)
    page.keyboard.press("Enter")
    expect(page.locator("#live-prompt")).to_have_text(following, timeout=60_000)
    page.wait_for_timeout(SECONDS * 1000)
    page.screenshot(path=folder / "live-steered.png")
    page.click("#live-stop")
    expect(page.locator("#live-whole")).to_be_visible(timeout=60_000)


def main(artifact: str, folder: str, prompt: str, following: str) -> None:
    """Serves an artifact and takes the pictures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        served(Path(data), f"live={artifact}") as server,
        chromium() as browser,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(server.url)
        take(page, Path(folder), prompt, following)


if __name__ == "__main__":
    main(*sys.argv[1:])
