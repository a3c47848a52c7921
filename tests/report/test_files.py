"""A report's file: replaced whole."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanreport.page import now, write_report
from wanreport.report import Report
from wanrun.errors import NoSpaceError


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
