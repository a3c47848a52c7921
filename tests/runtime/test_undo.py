"""What is under way is undone when a process ends without unwinding, and nothing new begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wanrun.undo import begun, undone_at_exit

HEAD = """
import os, sys, threading, time
from pathlib import Path

from wanrun.temporary import temporary_path
from wanrun.undo import begun, end, say, undone_at_exit

def printing(word):
    return lambda *of: print(word, *of, flush=True)
"""


def ended(code: str, *arguments: object, **streams: int) -> tuple[int, str, str]:
    """The exit code of a process, and what it printed to stdout and stderr."""
    command = [sys.executable, "-c", HEAD + code, *map(str, arguments)]
    captured = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(command, text=True, timeout=30, **captured)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def test_what_is_under_way_is_undone_the_last_first(tmp_path: Path) -> None:
    """A program is ended before the file is removed that it writes; what fails does not keep the others."""
    code = """
with undone_at_exit(printing("left")):
    pass
with (
    temporary_path(Path(sys.argv[1])) as path,
    begun(lambda: "file", printing("removes")),
    undone_at_exit(lambda: os.close(-1)),
    begun(lambda: "program", printing("ends")),
):
    path.write_text("half")
    end(7, "gone")
"""
    out = "ends program\nremoves file\n"
    assert ended(code, tmp_path / "video") == (7, out, "gone\n")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_begin_needs_no_undoing() -> None:
    code = """
def begin():
    raise FileNotFoundError

try:
    with begun(begin, printing("undone")):
        pass
except FileNotFoundError:
    end(0)
"""
    assert ended(code) == (0, "", "")


def test_nothing_begins_while_the_process_ends() -> None:
    code = """
def work():
    print("work", flush=True)
    with begun(printing("begun"), printing("undone")):
        print("entered", flush=True)

def undo():
    threading.Thread(target=work).start()
    time.sleep(0.3)

with undone_at_exit(undo):
    end(3)
"""
    assert ended(code) == (3, "work\n", "")


def test_what_begins_at_that_moment_is_undone() -> None:
    code = """
def begin():
    threading.Thread(target=end, args=(3,)).start()
    time.sleep(0.3)
    print("begun", flush=True)

with begun(begin, printing("undone")):
    time.sleep(60)
"""
    assert ended(code) == (3, "begun\nundone None\n", "")


def test_the_first_end_counts_and_is_the_last_to_speak() -> None:
    """A thread fails because of what is undone, and the main thread ends the process because of that."""
    code = """
def undo():
    threading.Thread(target=os.close, args=(-1,)).start()
    time.sleep(0.3)
    print("undone", flush=True)

with undone_at_exit(undo):
    threading.Thread(target=end, args=(3, "first")).start()
    time.sleep(0.1)
    end(4, "second")
"""
    assert ended(code) == (3, "undone\n", "first\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_is_stuck_does_not_hold_up_the_end(stream: str) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(2**16))
    except BlockingIOError:
        os.set_blocking(write, True)
    try:
        code = "with undone_at_exit(lambda: say('count')): end(3, 'word')"
        shown = ended(code, **{stream: write})
        assert shown[0] == 3
        assert shown[1:] == ((None, "word\n") if stream == "stdout" else ("count", None))
    finally:
        os.close(read)
        os.close(write)


def test_leaving_undoes_what_has_begun_and_nothing_else() -> None:
    undone: list[str] = []
    with begun(lambda: "begun", undone.append), undone_at_exit(lambda: undone.append("at exit")):
        assert undone == []
    assert undone == ["begun"]
