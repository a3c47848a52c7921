"""What is under way is undone when a process ends without unwinding, and nothing new begins."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest

from wanrun.terminal.temporary import temporary_path
from wanrun.terminal.undo import begun, everything_undone, undone_at_exit


def test_what_is_under_way_is_undone(tmp_path: Path) -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError

    with (
        temporary_path(tmp_path / "a") as path,
        undone_at_exit(fails),
        undone_at_exit(functools.partial(done.append, "undone")),
    ):
        path.write_text("half")
        with everything_undone():
            assert (done, path.exists()) == (["undone"], False)
    with everything_undone():
        assert done == ["undone"]


def test_the_last_is_undone_first() -> None:
    """A program is ended before the file is removed that it writes."""
    done: list[str] = []
    with begun(lambda: "file", done.append), begun(lambda: "program", done.append), everything_undone():
        assert done == ["program", "file"]


def test_what_does_not_begin_needs_no_undoing() -> None:
    def begin() -> None:
        raise FileNotFoundError

    undone: list[None] = []
    with pytest.raises(FileNotFoundError), begun(begin, undone.append):
        pass
    with everything_undone():
        assert undone == []


def test_nothing_begins_while_the_process_ends() -> None:
    did: list[str] = []

    def work() -> None:
        with begun(lambda: did.append("begun"), lambda nothing: did.append("undone")):
            did.append("entered")

    thread = threading.Thread(target=work)
    with everything_undone():
        thread.start()
        thread.join(0.2)
        assert did == []
    thread.join()
    assert did == ["begun", "entered"]
