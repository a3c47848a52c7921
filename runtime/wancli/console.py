"""Parts that both command lines share: one-line errors and exit codes.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | verification failed, too little memory, or an internal error |
| 2 | usage, an output that cannot be written, an input image that cannot be used |
| 3 | the artifact is not usable here |
| 4 | the source is not usable, the disk is full, or a file reaches the largest size (`ulimit -f`) |
| 5 | another process of a run of several failed, is gone or is silent |
| 129, 130, 143 | hung up (SIGHUP), interrupted (Ctrl-C), terminated (SIGTERM) |
| 141 | the reader of the output has closed it, as in ``wanrun --list | head -1`` |
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from wancli.error_line import JSON_ERRORS, error_line
from wancli.parent import tell_end
from wanrun.codes import ErrorCode
from wanrun.errors import (
    CancelledError,
    NoSpaceError,
    UsageError,
    WanError,
    escaped,
    lacks_space,
    shortened,
    space_told,
)
from wanrun.request.prompts_file import key_of
from wanrun.terminal.lines import print_error, silence_stdout
from wanrun.undo import end


def run(command: click.Command, argv: Sequence[str] | None = None) -> int:
    """Runs a command, reports any failure as one line on stderr, and returns the exit code: see the table.

    Signals are left as they are. ``--debug`` among the arguments, by default the process's, also prints a
    traceback, and ``--json-errors`` prints the failure as JSON (``error_line``).
    """
    if (code := _completed(command)) is not None:
        return code
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _invoke(command, list(arguments))  # click empties the list
        if sys.stdout is not None:  # None if closed, as with >&-
            sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        if error.filename is None:
            silence_stdout()
            return 141
        return _report(error, command, arguments)
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, command, arguments)


def _completed(command: click.Command) -> int | None:
    """Answers a shell that completes a command line, and returns the exit code; None if none asks."""
    name = command.name or "wanrun"
    variable = f"_{name.upper()}_COMPLETE"
    if not (instruction := os.environ.get(variable)):
        return None
    from click.shell_completion import shell_complete

    return shell_complete(command, {}, name, variable, instruction)


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, without the interpreter's end.

    During that end the signals' handlers are gone: a signal would end a finished run without a word. The
    interpreter also waits for threads, whatever they compile or read, and runs C++ destructors concurrently.
    ``run`` has flushed what was printed. A signal that is already ending the process is left to do so.
    """
    end(code)


def _invoke(command: click.Command, arguments: list[str]) -> int:
    """Parses and runs. ``command.main`` would treat an EOFError from a damaged file as Ctrl-C."""
    try:
        with command.make_context(command.name or "wanrun", arguments) as context:
            result = command.invoke(context)
    except click.exceptions.Exit as request:
        return request.exit_code
    return result if type(result) is int else 0


def _report(error: BaseException, command: click.Command, arguments: list[str]) -> int:
    """Prints the error and returns its exit code."""
    if "--debug" in arguments:
        traceback.print_exception(error)
    code, lines = _lines(error, command, JSON_ERRORS in arguments)
    if not tell_end(code, "\n".join(lines)):
        for line in lines:
            print_error(line)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        silence_stdout()
    return code


def _lines(error: BaseException, command: click.Command, as_json: bool) -> tuple[int, list[str]]:
    """Returns the exit code, and the lines to print."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        assert isinstance(error, click.UsageError)  # a group without a subcommand: click >= 8.2 has its help
        return 2, [escaped(line) for line in error.format_message().split("\n")]
    if isinstance(error, KeyboardInterrupt | click.Abort) and not as_json:
        return 130, ["interrupted"]
    known = _known(error, command)
    return known.exit_code, [escaped(error_line(known, flags(command), as_json))]


def _known(error: BaseException, command: click.Command) -> WanError:
    """Returns an error as one of ours."""
    if isinstance(error, WanError):
        return error
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return CancelledError("cancelled", "interrupted")
    if isinstance(error, click.ClickException):
        return _of_click(error, command)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError("invalid_value", f"a file's name is too long: {shortened(str(error.filename))}")
    if isinstance(error, OSError) and lacks_space(error):
        return NoSpaceError("no_space", space_told(error))
    if _lacks_resources(error):
        return WanError(
            "out_of_memory",
            "the system gives this process no more memory, threads or files",
            remedy="free some, or raise limits (ulimit -a)",
        )
    text = _one_line(str(error).strip().partition("\n")[0])
    if "RESOURCE_EXHAUSTED" in text:
        what = f"the device has too little memory left: {text}"
        return WanError("out_of_memory", what, remedy="use --memory low or a smaller profile")
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return WanError("internal_error", f"internal error: {detail} (run again with --debug for the traceback)")


def _of_click(error: click.ClickException, command: click.Command) -> UsageError:
    """Returns an error of click's as one of ours; that of an option's own syntax keeps its code and parts."""
    codes: dict[type[click.ClickException], ErrorCode] = {
        click.NoSuchOption: "unknown_parameter",
        click.MissingParameter: "missing_parameter",
        click.FileError: "unreadable",
    }
    name = getattr(getattr(error, "ctx", None), "command_path", None) or command.name or "wanrun"
    if isinstance(error, click.BadParameter) and isinstance(own := error.__cause__, UsageError):
        what = _one_line(click.BadParameter(own.what, error.ctx, error.param).format_message())
        remedy = "; ".join(filter(None, [own.remedy, f"see {name} --help"]))
        return UsageError(**{**own.parts, "what": what, "remedy": remedy})
    text = _one_line(error.format_message()).rstrip(".")
    hint = "; give a prompt as --prompt TEXT" if name == "wanrun" and "extra argument" in text else ""
    code: ErrorCode = next((codes[kind] for kind in codes if isinstance(error, kind)), "invalid_value")
    return UsageError(code, f"{text}{hint} (see {name} --help)")


def _lacks_resources(error: BaseException) -> bool:
    """Whether an error says that the system has no more memory, threads, processes or files."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
    text = str(error)
    if isinstance(error, ImportError):  # a shared library that cannot be mapped
        return "failed to map segment" in text or "annot allocate memory" in text
    thread = isinstance(error, RuntimeError) and "can't start new thread" in text
    return isinstance(error, MemoryError) or thread


def flags(command: click.Command) -> Callable[[str], str]:
    """Returns a function that turns an option's Python name into its flag, for ``WanError.spelled``."""
    own = {param.name: param.opts[0] for param in command.params if isinstance(param, click.Option)}
    return lambda name: own.get(name, f"--{key_of(name).replace('_', '-')}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
