"""Fixtures of the tests that have torch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import jax
import pytest

from helpers import torch_threads
from wanbuild.cli import wanbuild
from wanrun.cli import wanrun
from wanrun.console import run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch runs on one thread."""
    with torch_threads.one_thread():
        yield


class CommandsHere:
    """Runs the commands in this process.

    A process of its own spends two seconds of CPU on its start: ``cli`` runs them so.
    """

    def succeeds(self, program: str, *arguments: object) -> str:
        """Runs a command that has to succeed; returns what it printed. It finds no program in memory."""
        jax.clear_caches()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(
                {"wanrun": wanrun, "wanbuild": wanbuild}[program], [str(argument) for argument in arguments]
            )
        assert code == 0, f"exit code {code}: {out.getvalue()}{err.getvalue()}"
        return out.getvalue()


@pytest.fixture(scope="session")
def commands() -> CommandsHere:
    """Runs ``wanrun`` and ``wanbuild`` in this process."""
    return CommandsHere()
