"""Runs commands one after the other in one process, which has imported jax: a fault then costs a tenth.

It reads a JSON object a line from stdin (``command``, ``arguments``, ``environment``) and answers with
``code`` and ``err``. A crash is seen by the process that started it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one command with its streams in files: libraries write to the descriptors."""
    from wanbuild.cli import wanbuild
    from wancli.console import run
    from wancli.run import wanrun

    command = wanrun if request["command"] == "wanrun" else wanbuild
    stream = functools.partial(tempfile.TemporaryFile, "w+", errors="replace")
    with stream() as out, stream() as err:
        saved = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            with _environment(request["environment"]):
                code = run(command, request["arguments"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        return {"code": code, "err": _text(err)}


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read(100_000)


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
