"""Lines of commands: one each, whatever names are in it; nothing is lost because one cannot be printed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest

from helpers.refusals import check_refusal
from wanrun.errors import NoSpaceError, UsageError, errno_in, escaped, unwritable

NAME = "a\nb\x1b[31m\udcff 猫\u3000.mp4"
LATIN = "a\\nb\\x1b[31m\\udcff \\u732b\\u3000.mp4"
SHOWN = "a\\nb\\x1b[31m\\udcff 猫\u3000.mp4"


def call(code: str, to: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code with the functions of the module, its streams redirected as a shell does."""
    program = f"from wanrun.terminal.lines import *\nname = {NAME!a}\n{code}"
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {to}', sys.executable, program],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_what_is_not_shown_is_escaped() -> None:
    assert escaped(NAME) == SHOWN
    assert escaped("plain, 猫") == "plain, 猫"
    assert escaped("\u2028\u202e\t") == "\\u2028\\u202e\\t"


FULL = rf"warning: standard output .*{re.escape(os.strerror(errno.ENOSPC))}.*\n"
RESULT = """
from wanrun.errors import NoSpaceError
try: print_result(name)
except NoSpaceError as it: warn(it.code + it.what)
"""


@pytest.mark.parametrize(
    ("code", "how", "out", "err"),
    [
        ("print_result(name)", {}, f"{SHOWN}\n", ""),
        ("report(name)", {}, f"{SHOWN}\n", ""),
        ("warn(name)", {}, "", re.escape(f"warning: {SHOWN}\n")),
        ("print_error(name)", {}, "", re.escape(f"{SHOWN}\n")),
        ("report(name)", {"PYTHONIOENCODING": "iso-8859-1"}, f"{LATIN}\n", ""),
        (
            "report('one', 'two'); report('three'); print_error('end')",
            {"to": "> /dev/full"},
            "",
            f"{FULL}end\n",
        ),
        (RESULT, {"to": "> /dev/full"}, "", "warning: no_space.*standard output.*\n"),
        ("warn('one'); print_error('two'); report('end')", {"to": "2> /dev/full"}, "end\n", ""),
    ],
)
def test_a_line_is_one_line_and_stops_nothing(code: str, how: dict[str, str], out: str, err: str) -> None:
    done = call(code, **how)
    assert (done.returncode, done.stdout) == (0, out)
    assert re.fullmatch(err, done.stderr)


@pytest.mark.parametrize("function", ["report", "print_result", "warn"])
def test_a_reader_that_has_gone_is_left_to_the_command(function: str) -> None:
    code = (
        "import os, signal\nread, write = os.pipe(); os.close(read)\n"
        "os.dup2(write, 2 if function == 'warn' else 1)\n"
        "try: globals()[function]('x')\nexcept BrokenPipeError: os._exit(7)"
    )
    assert call(f"function = {function!r}\n{code}").returncode == 7


def test_errors_that_are_told_in_words_alone() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert errno_in(f"error: {os.strerror(number)} ({number})") == number
    assert errno_in("a bug") == errno.EIO


def test_what_cannot_be_written() -> None:
    full = unwritable("a.mp4", OSError(errno.EDQUOT, "Quota"), "give --output")
    assert isinstance(full, NoSpaceError) and full.exit_code == 4
    check_refusal(full, "no_space", what="a.mp4", remedy="give --output")
    large = unwritable("a.mp4", OSError(errno.EFBIG, "File too large"), "give --output")
    assert isinstance(large, NoSpaceError)
    check_refusal(large, "no_space", what="a.mp4", remedy="ulimit -f")
    assert str(large.remedy).endswith("give --output")
    other = unwritable("a.mp4", OSError(errno.EACCES, "Permission denied"), "choose another")
    assert type(other) is UsageError and other.remedy == "choose another"
    check_refusal(other, "unwritable", what="a.mp4", found="Permission denied")
    check_refusal(unwritable("a", OSError("odd")), "unwritable", found="odd", remedy=None)
