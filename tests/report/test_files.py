"""A report's file: refused before the work, and replaced whole after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wanreport.files import check_file, now, write_report
from wanreport.report import Report
from wanrun.errors import NoSpaceError, UsageError


def report(title: str = "A run") -> Report:
    return Report("Report of a run", title, "made", True, now())


def test_a_report_replaces_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    for title in ("first", "second \udcff"):  # a name of a file that is not UTF-8
        check_file(path)
        write_report(path, report(title))
        assert f"<h1>{title[:5]}" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", now())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".", "cannot be written; expected a file in a writable folder"),
        ("nowhere/r.html", "cannot be written; expected a file in a writable folder"),
        ("artifact/r.html", "lies inside"),
        ("link/r.html", "lies inside"),
        ("o.json", "is also another file of this command"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "link").symlink_to("artifact")
    with pytest.raises(UsageError, match=f"--report .*{expected}.*name another file"):
        check_file(tmp_path / name, tmp_path / "artifact", [None, tmp_path / "o.json"])


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(self: Path, *arguments: object, **options: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(
            NoSpaceError, match=r"no space left to write the report .*choose another --report"
        ):
            write_report(path, report())
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
