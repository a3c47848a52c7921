"""Exit codes, errors as a line of text or JSON, signals and streams, with real processes where it matters."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import click
import pytest

from helpers.refusals import check_json, json_error
from wancli.command import Written
from wancli.console import run
from wancli.error_line import error_line
from wancli.streams import stdout_for_video
from wanrun.errors import ArtifactError, SourceError, UsageError, VerificationError, WanError, field
from wanrun.request.written import parse_size

SIZE = Written("WxH", parse_size)


def failing(error: BaseException) -> click.Command:
    @click.command("wanrun")
    @click.option("--debug", is_flag=True)
    @click.option("--json-errors", is_flag=True)
    @click.option("--steps", type=int)
    @click.option("--size", type=SIZE)
    def command(**options: Any) -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "exit_code", "code", "named"),
    [
        (VerificationError("other_results", "frames differ"), 1, "other_results", "frames differ"),
        (UsageError("exists", "a.mp4 exists", remedy="pass -y"), 2, "exists", "a.mp4 exists; pass -y"),
        (ArtifactError("damaged", "x", expected="1", found="2"), 3, "damaged", "x; expected 1; found 2"),
        (SourceError("missing_file", "no such file"), 4, "missing_file", "no such file"),
        (WanError("failed", "two\nlines"), 1, "failed", "two lines"),
        (click.UsageError("Bad\nthing."), 2, "invalid_value", "Bad thing (see wanrun --help)"),
        (click.FileError("x.json", "not\nreadable"), 2, "unreadable", "'x.json': not readable"),
        (KeyboardInterrupt(), 130, "cancelled", "interrupted"),
        (click.Abort(), 130, "cancelled", "interrupted"),
        (OSError(errno.ENOSPC, "No space", "/a/b"), 4, "no_space", " at /a/b; "),
        (OSError(errno.ENOSPC, "No space", "/a\nb"), 4, "no_space", " at /a\\nb; "),
        (OSError(errno.EDQUOT, "Quota"), 4, "no_space", "the disk is full; "),
        (
            OSError(errno.EFBIG, "File too large", "/a/b"),
            4,
            "no_space",
            " at /a/b; raise the limit (ulimit -f)",
        ),
        (OSError(errno.EFBIG, "File too large"), 4, "no_space", "(File too large); raise the limit (ulimit"),
        (OSError(errno.ENAMETOOLONG, "long", "x" * 300), 2, "invalid_value", f"'{'x' * 60}...'"),
        (BrokenPipeError(errno.EPIPE, "Broken", "/a/fifo"), 1, "internal_error", "BrokenPipeError: "),
        (ValueError("first\nsecond"), 1, "internal_error", "ValueError: first (run again with --debug"),
        (EOFError("truncated"), 1, "internal_error", "EOFError: truncated ("),
        (RuntimeError("another"), 1, "internal_error", "RuntimeError: another ("),
        *(
            (error, 1, "out_of_memory", "memory, threads or files; free some, or raise")
            for error in (
                MemoryError(),
                OSError(errno.ENOMEM, "Cannot allocate memory"),
                BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
                OSError(errno.EMFILE, "Too many open files"),
                RuntimeError("can't start new thread"),
                ImportError("x.so: failed to map segment from shared object"),
            )
        ),
    ],
)
def test_errors_are_one_line_and_a_code(
    error: BaseException, exit_code: int, code: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, and as JSON with the same message."""
    assert run(failing(error), []) == exit_code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    assert run(failing(error), ["--json-errors"]) == exit_code
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1
    found = check_json(line, code, exit_code=exit_code)
    assert named in err and found["message"] == err.strip().removeprefix("error: ")


@pytest.mark.parametrize(
    "error", [ValueError("bug"), ArtifactError("damaged", "damaged"), KeyboardInterrupt()]
)
def test_debug_adds_the_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    run(failing(error), ["--debug"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback ")
    assert "raise error" in "\n".join(lines)
    assert lines[-1].startswith(("error: ", "interrupted"))


@pytest.mark.parametrize(
    ("argv", "code", "message", "parts"),
    [
        (["--no-such"], "unknown_parameter", "No such option", {}),
        (["--steps", "four"], "invalid_value", "'--steps': 'four' is not a valid integer", {}),
        (["--size", "big"], "wrong_type", "'--size'", {"expected": "832x480", "found": "big"}),
        (["extra"], "invalid_value", "unexpected extra argument (extra); give a prompt as --prompt TEXT", {}),
        (["--steps"], "invalid_value", "requires an argument", {}),
    ],
)
def test_usage(
    argv: list[str], code: str, message: str, parts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing(AssertionError()), argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert err.rstrip(")\n").endswith("see wanrun --help")
    assert run(failing(AssertionError()), ["--json-errors", *argv]) == 2
    check_json(capsys.readouterr().err, code, message=message, **parts)


def test_success_help_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    @click.group("wanbuild")
    @click.version_option("1.2", prog_name="wanbuild")
    def group() -> None: ...

    @group.command()
    @click.option("--size", type=SIZE, multiple=True, default=[(64, 32)])
    def sizes(size: Any) -> None:
        click.echo(repr(size))

    @group.command()
    @click.pass_context
    def leave(context: click.Context) -> None:
        context.exit(3)

    @group.command()
    def number() -> int:
        return 1

    assert run(group, ["sizes"]) == 0
    assert run(group, ["sizes", "--size", "832x480", "--size", "832*480"]) == 0
    assert capsys.readouterr().out.splitlines() == [repr(((64, 32),)), repr(((832, 480), (832, 480)))]
    assert run(group, ["leave"]) == 3
    assert run(group, ["number"]) == 1
    assert run(group, ["--help"]) == run(group, ["--version"]) == run(group, ["sizes", "--help"]) == 0
    assert "Usage: wanbuild" in capsys.readouterr().out
    assert run(group, ["sizes", "--size", "x"]) == 2
    assert "wanbuild sizes --help" in capsys.readouterr().err
    assert run(group, ["nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err
    run(group, [])
    out, err = capsys.readouterr()
    assert "Usage: wanbuild" in out + err


def test_arguments_come_from_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wanrun", "--steps", "x"])
    assert run(failing(AssertionError())) == 2
    assert "'x'" in capsys.readouterr().err


def test_signals_are_left_to_whoever_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that calls a command as a function, as these tests do, keeps its handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    seen: list[Any] = []

    @click.command()
    def command() -> None:
        seen.extend(map(signal.getsignal, numbers))
        raise KeyboardInterrupt

    before = list(map(signal.getsignal, numbers))
    assert run(command, []) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert seen == before == list(map(signal.getsignal, numbers))


def test_other_threads_can_run_commands(capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(failing(ArtifactError("damaged", "no")), [])))
    thread.start()
    thread.join()
    assert codes == [3]


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_is_no_news(lines: int) -> None:
    code = (
        "import sys, click; from wancli.console import run\n"
        "@click.command()\n"
        f"def command():\n    for i in range({lines}): print('line', i)\n"
        "sys.exit(run(command, []))"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (result.returncode, result.stderr) == (141, "")


# An error as text, and as JSON.


def test_text_and_json_say_the_same() -> None:
    error = UsageError("out_of_range", f"{field('num_steps')} is\ntoo small", expected="1 or more", found=0)
    text, line = (error_line(error, "--{}".format, as_json) for as_json in (False, True))
    assert json_error(line) == {
        "code": "out_of_range",
        "exit_code": 2,
        "message": text.removeprefix("error: "),
        "expected": "1 or more",
        "found": "0",
        "options": ["--num_steps"],
    }
    assert line.isprintable() and text.isprintable()


# Standard output.


CODE = """
import os
from wancli.streams import keep_stdout
print("before")
keep_stdout(quiet={quiet})
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks\\n")
print("after \N{SNOWMAN}")
"""


@pytest.mark.parametrize(("quiet", "lines"), [(False, ["before", "after \N{SNOWMAN}"]), (True, ["before"])])
def test_lines_of_others(quiet: bool, lines: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", CODE.format(quiet=quiet)],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.splitlines() == lines


VIDEO = """
import os, subprocess
from wancli.streams import stdout_for_video
print("before")
video = stdout_for_video()
print("after", flush=True)
subprocess.run(["echo", "other"])
os.write(video, bytes(3))
"""


def test_a_video_alone() -> None:
    done = subprocess.run([sys.executable, "-c", VIDEO], capture_output=True, check=True)
    assert (done.stdout, done.stderr.split()) == (b"before\n" + bytes(3), [b"after", b"other"])


def test_a_terminal_takes_no_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(UsageError, match="--output"):
        stdout_for_video()
