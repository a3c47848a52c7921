"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from damage import Refused, linked, one_error

# Before any test imports a hub client: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
# Nor read or write the user's cache, also not while fixtures of a module are made.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="wanrun-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has an empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random wan2.1-t2v checkpoint in the published layout, seed 0, float32. Not to be changed."""
    from wanbuild.toy import write_toy

    return _shared(tmp_path_factory, "checkpoint", lambda folder: write_toy(folder, "wan2.1-t2v", seed=0))


@pytest.fixture(scope="session")
def toy_artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy, float32 throughout, with the profile 96x64x9-b1-cfg. Not to be changed."""
    return _shared(tmp_path_factory, "artifact", lambda folder: _build_artifact(toy_checkpoint, folder))


@pytest.fixture(scope="session")
def two_experts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-t2v: two experts, and a boundary of 0.875."""
    from wanbuild.toy import write_toy

    return _shared(tmp_path_factory, "two-checkpoint", lambda folder: write_toy(folder, "wan2.2-t2v", seed=0))


@pytest.fixture(scope="session")
def two_experts_artifact(two_experts_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two experts, and the profile 96x64x9-b1-nocfg."""

    def build(folder: Path) -> None:
        _build_artifact(two_experts_checkpoint, folder, guidance=(True, False))

    return _shared(tmp_path_factory, "two-artifact", build)


@pytest.fixture(scope="session")
def ti2v_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-ti2v: a timestep per token, and the residual VAE with the published mean and std."""
    from wanbuild.toy import write_toy

    return _shared(
        tmp_path_factory, "ti2v-checkpoint", lambda folder: write_toy(folder, "wan2.2-ti2v", seed=0)
    )


@pytest.fixture(scope="session")
def ti2v_artifact(ti2v_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-ti2v, with the profile 160x96x13-b1-cfg: 60 tokens.

    For fewer than 52 XLA's CPU backend adds up 512 text tokens one by one, four times less exactly.
    """

    def build(folder: Path) -> None:
        _build_artifact(ti2v_checkpoint, folder, size=(160, 96), num_frames=13)

    return _shared(tmp_path_factory, "ti2v-artifact", build)


@pytest.fixture
def artifact_copy(toy_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the toy artifact that the test may damage."""
    return Path(shutil.copytree(toy_artifact, tmp_path / "artifact"))


def _build_artifact(
    checkpoint: Path,
    folder: Path,
    size: tuple[int, int] = (96, 64),
    num_frames: int = 9,
    guidance: Sequence[bool] = (True,),
) -> None:
    from wanbuild.compile import CompileRequest, compile_artifact
    from wanbuild.convert import ConvertRequest, convert
    from wanbuild.programs import BuildOptions

    convert(ConvertRequest(checkpoint, folder, {"transformer": "float32", "text_encoder": "float32"}))
    options = BuildOptions(dtype="float32")
    compile_artifact(CompileRequest(folder, ["cpu"], [size], [num_frames], guidance, options=options), print)


def _shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Makes a folder once for all workers of the test run."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"shared-{name}"
    with FileLock(base / f"shared-{name}.lock"):
        if not folder.exists():
            building = base / f"building-{name}"  # so that what failed half-way is not taken for complete
            shutil.rmtree(building, ignore_errors=True)
            make(building)
            building.rename(folder)
    return folder


class CommandLine:
    """Runs the installed commands as a user does: in a process of their own."""

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a command; the first argument is ``wanrun`` or ``wanbuild``."""
        program, *rest = map(str, arguments)
        command = [str(Path(sys.executable).with_name(program)), *rest]
        return subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def fails(self, code: int, *arguments: object, **environment: str) -> str:
        """Runs a command that has to fail with this code and one line; returns the line."""
        result = self(*arguments, **environment)
        assert result.returncode == code, f"exit code {result.returncode}: {result.stdout}{result.stderr}"
        errors = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
        assert len(errors) == 1 and errors[0].startswith("error: "), result.stderr
        assert "internal error" not in errors[0], errors[0]
        return errors[0]

    def succeeds(self, *arguments: object, **environment: str) -> str:
        """Runs a command that has to succeed; returns what it printed."""
        result = self(*arguments, **environment)
        assert result.returncode == 0, f"exit code {result.returncode}: {result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture(scope="session")
def cli() -> CommandLine:
    """Runs ``wanrun`` and ``wanbuild`` in subprocesses."""
    return CommandLine()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs wanrun here, which has to fail with one line and write nothing; returns the line."""

    def call(artifact: Path, *options: object, code: int = 3) -> str:
        output = tmp_path / "output"
        output.mkdir(exist_ok=True)
        from wanrun.cli import wanrun
        from wanrun.console import run

        arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output / "o.npy"]
        capsys.readouterr()
        assert run(wanrun, [str(argument) for argument in (*arguments, *options)]) == code
        assert list(output.iterdir()) == []
        return one_error(capsys)

    return call


@pytest.fixture
def artifact(toy_artifact: Path, tmp_path: Path) -> Path:
    """The toy artifact with a manifest of its own; its folders are links until a test calls ``own``."""
    return linked(toy_artifact, tmp_path / "artifact")


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a run goes as far as reading weights."""

    def read(*arguments: object) -> None:
        raise AssertionError("weights are read")

    from wanrun import loader

    monkeypatch.setattr(loader, "Restore", read)
