"""Fixtures of the tests that have torch."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from helpers.artifacts import build_artifact, far_toy, shared
from helpers.whole_path import Row, WholePath
from wanbuild.cli import wanbuild
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wancli.run import wanrun

WARNINGS = (
    # diffusers hands arrays to NumPy, and NumPy's to its tensors, in ways that NumPy 2 warns of.
    "ignore:__array__ implementation doesn't accept:DeprecationWarning",
    "ignore:__array_wrap__ must accept:DeprecationWarning",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    for one in WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(one))


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


Toys = Callable[[str], tuple[Path, Path]]
FIXTURES = {"wan2.1-t2v": "toy", "wan2.2-t2v": "two_experts", "wan2.2-ti2v": "ti2v"}
"""By variant, of those that have an artifact of their own."""


@pytest.fixture(scope="session")
def toy_of(media_toy: Toys, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Toys:
    """Gives a checkpoint and its artifact by variant, all of float32. Not to be changed."""

    def toy(variant: str) -> tuple[Path, Path]:
        if variant in FIXTURES:
            checkpoint, artifact = (
                request.getfixturevalue(f"{FIXTURES[variant]}_{kind}") for kind in ("checkpoint", "artifact")
            )
            return checkpoint, artifact
        make = {"anyflow-wan2.1": flow_toy, "anyflow-far-wan2.1": far_toy}.get(variant)
        return media_toy(variant) if make is None else make(tmp_path_factory)

    return toy


def flow_toy(factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A toy of AnyFlow and its artifact."""
    checkpoint = shared(
        factory, "anyflow", lambda folder: write_toy(folder, "anyflow-wan2.1", flow_shift=5.0)
    )

    def build(folder: Path) -> None:
        build_artifact(checkpoint, folder, guidance=(False,), loop="all")

    return checkpoint, shared(factory, "anyflow-artifact", build)


@pytest.fixture(scope="module")
def paths(
    toy_of: Toys,
    commands: CommandsHere,
    cli: Any,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Callable[[str], WholePath]:
    """Gives a whole path by its name in the module's ``ROWS``."""
    rows: Mapping[str, Row] = request.module.ROWS

    @functools.cache
    def path(name: str) -> WholePath:
        row = rows[name]
        run = cli if row.process else commands
        return WholePath(row, toy_of(row.toy), run, tmp_path_factory.mktemp("path"))

    return path
