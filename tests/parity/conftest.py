"""Fixtures of the tests that have torch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from wanbuild.cli import wanbuild
from wancli.console import run
from wancli.run import wanrun


@pytest.fixture(scope="session")
def jax_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JAX's compilation cache."""
    return tmp_path_factory.mktemp("jax-cache")


@pytest.fixture(scope="module")
def encoders_compiled_once(jax_cache: Path) -> Iterator[None]:
    """``wanbuild verify`` compiles the VAE's encoder, mostly the same one: it is taken from JAX's cache."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(jax_cache))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


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
