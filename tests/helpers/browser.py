"""Debian's Chromium, driven by Playwright, for the tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, sync_playwright

CHROMIUM = shutil.which("chromium")

IN_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and "WAN_TEST_BROWSER" not in os.environ, reason="there is no chromium"
    ),
]
"""The marks of a module whose tests need it; with ``WAN_TEST_BROWSER`` they fail where it is missing."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, which asks for nothing by itself."""
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def plays(video: Locator) -> bool:
    """Whether a video that was told to play does so within 10 s. It asks anew each time: a page's policy
    forbids Playwright's own way of waiting, which makes code of a text there."""
    for _ in range(100):
        if float(video.evaluate("one => one.currentTime")) > 0:
            return True
        video.page.wait_for_timeout(100)
    return False
