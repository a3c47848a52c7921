"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.artifacts import (
    MEDIA_PROFILES,
    OWN_PROGRAMS,
    build_artifact,
    build_on_mesh,
    compile_fast,
    compiled_store,
    shared,
)
from helpers.cost import Cost, part
from helpers.damage import Declines, Refused, linked, one_error
from helpers.devices import on_devices
from helpers.loaded_once import loaded_once
from helpers.refusals import check_json
from helpers.tiers import mark

if TYPE_CHECKING:
    from helpers.fake_pipeline import Fake

# Before any test imports a hub client: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
# On arrays this small, threads of torch's that wait for each other take five times longer than one.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests write and fsync tens of thousands of small files: on a busy disk they wait for it 10 times longer than
# they compute. Their folders are in memory where there is room, which pytest's variable for them tells it.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Nor read or write the user's cache, also not while fixtures of a module are made.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="wanrun-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")
)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch",
        action="store_true",
        help="Let imports of torch, diffusers, transformers, peft and accelerate fail, also in subprocesses.",
    )
    parser.addoption("--record-times", metavar="FILE", help="Write what each test costs to a file of JSON.")


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("--record-times")
    config.pluginmanager.register(Cost(Path(record) if record else None), "cost")
    if config.getoption("--without-torch"):
        from helpers.without_torch import sitecustomize

        assert not sitecustomize.PACKAGES & sys.modules.keys()
        folders = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items)


@pytest.fixture(scope="session")
def new_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Empty folders in one: ``mktemp`` looks through all that it has made, for each test."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_cache(new_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has an empty cache of its own."""
    cache = next(new_caches)
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session", autouse=True)
def executables_are_loaded_once() -> Iterator[None]:
    with loaded_once():
        yield


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random wan2.1-t2v checkpoint in the published layout, seed 0, float32. Not to be changed."""
    from wanbuild.toy.toy_checkpoint import write_toy

    return shared(tmp_path_factory, "checkpoint", lambda folder: write_toy(folder, "wan2.1-t2v", seed=0))


@pytest.fixture(scope="session")
def toy_artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy, float32 throughout, with the profile 96x64x9-b1-cfg. Not to be changed."""
    return shared(
        tmp_path_factory, "artifact", lambda folder: build_artifact(toy_checkpoint, folder, shipping=True)
    )


@pytest.fixture(scope="session")
def golden(toy_artifact: Path) -> dict[str, Any]:
    """What the toy artifact makes of the recorded result's prompt. Not to be changed."""
    from helpers.elsewhere import record

    return record(toy_artifact)


@pytest.fixture
def elsewhere(artifact: Path) -> Path:
    """The toy artifact with one target, whose executables have not run here."""
    from helpers.elsewhere import build_elsewhere

    build_elsewhere(artifact)
    return artifact


@pytest.fixture(scope="session")
def mesh_artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for four devices, with the profile 96x64x5-b1-cfg and the target cpu-data2-context2."""
    store = str(compiled_store(tmp_path_factory))

    def build(folder: Path) -> None:
        on_devices(4, build_on_mesh, store, str(toy_checkpoint), str(folder), "data=2,context=2")

    return shared(tmp_path_factory, "mesh-artifact", build)


@pytest.fixture(scope="session")
def two_experts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-t2v: two experts, and a boundary of 0.875."""
    from wanbuild.toy.toy_checkpoint import write_toy

    return shared(tmp_path_factory, "two-checkpoint", lambda folder: write_toy(folder, "wan2.2-t2v", seed=0))


@pytest.fixture(scope="session")
def two_experts_artifact(two_experts_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two experts, which can begin with a video, and the profile 96x64x9-b1-nocfg."""

    def build(folder: Path) -> None:
        build_artifact(
            two_experts_checkpoint,
            folder,
            guidance=(True, False),
            shipping=True,
            video_to_video=True,
            guiders=["cfg-zero", "skip-layer"],
            nag=True,
        )

    return shared(tmp_path_factory, "two-artifact", build)


@pytest.fixture(scope="session")
def ti2v_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-ti2v: a timestep per token, and the residual VAE with the published mean and std."""
    from wanbuild.toy.toy_checkpoint import write_toy

    return shared(
        tmp_path_factory, "ti2v-checkpoint", lambda folder: write_toy(folder, "wan2.2-ti2v", seed=0)
    )


@pytest.fixture(scope="session")
def ti2v_artifact(ti2v_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of wan2.2-ti2v, with the profile 160x96x13-b1-cfg, which can begin with a video: 60 tokens.

    For fewer than 52 XLA's CPU backend adds up 512 text tokens one by one, four times less exactly.
    """

    def build(folder: Path) -> None:
        build_artifact(ti2v_checkpoint, folder, size=(160, 96), num_frames=13, video_to_video=True)

    return shared(tmp_path_factory, "ti2v-artifact", build)


@pytest.fixture(scope="session")
def bfloat16_vae_artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default build of the toy, but for a VAE in bfloat16, stored and computed; one frame of 32x16."""

    def build(folder: Path) -> None:
        from wanbuild.build import convert
        from wanbuild.build_options import BuildOptions, CompileRequest
        from wanbuild.conversion.convert_request import ConvertRequest

        convert(ConvertRequest(toy_checkpoint, folder, {"vae": "bfloat16"}))
        options = BuildOptions(vae_dtype="bfloat16", loop="step")
        request = CompileRequest(folder, ["cpu"], [(32, 16)], [1], options=options)
        compile_fast(request, (*OWN_PROGRAMS, "decode_video"))

    return shared(tmp_path_factory, "bfloat16-vae-artifact", build)


@pytest.fixture(scope="session")
def media_toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Gives a checkpoint and its artifact by variant, of those that take images. Not to be changed."""

    def make(variant: str) -> tuple[Path, Path]:
        from wanbuild.toy.toy_checkpoint import write_toy

        with part("tests::media_toy"):
            checkpoint = shared(
                tmp_path_factory, f"{variant}-checkpoint", lambda folder: write_toy(folder, variant, seed=0)
            )
            artifact = shared(
                tmp_path_factory,
                f"{variant}-artifact",
                lambda folder: build_artifact(
                    checkpoint, folder, **{"loop": "step"} | MEDIA_PROFILES[variant]
                ),
            )
        return checkpoint, artifact

    return make


@pytest.fixture(scope="session")
def slots_toy(
    media_toy: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Gives what ``media_toy`` gives, with slots of rank 8 in the programs. Not to be changed.

    Animate has one profile, with guidance.
    """

    def make(variant: str) -> tuple[Path, Path]:
        checkpoint, _ = media_toy(variant)
        profiles = {"loop": "step"} | MEDIA_PROFILES[variant]
        if len(profiles.get("guidance", ())) > 1:
            profiles |= {"guidance": (True,), "loop": "step"}
        with part("tests::slots_toy"):
            artifact = shared(
                tmp_path_factory,
                f"{variant}-slots-artifact",
                lambda folder: build_artifact(checkpoint, folder, rank=8, **profiles),
            )
        return checkpoint, artifact

    return make


@pytest.fixture
def artifact_copy(toy_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the toy artifact that the test may damage."""
    return Path(shutil.copytree(toy_artifact, tmp_path / "artifact"))


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
        assert len(errors) == 1 and errors[0].startswith(("error: ", '{"error": ')), result.stderr
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
        from wancli.console import run
        from wancli.run import wanrun

        arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output / "o.npy"]
        capsys.readouterr()
        assert run(wanrun, [str(argument) for argument in (*arguments, *options)]) == code
        assert list(output.iterdir()) == []
        return one_error(capsys)

    return call


@pytest.fixture
def declines(refused: Refused) -> Declines:
    """As ``refused``; checks the error's code and the values in its parts (``check_json``)."""

    def call(artifact: Path, error: str, *options: object, code: int = 3, **parts: object) -> dict[str, Any]:
        return check_json(refused(artifact, *options, "--json-errors", code=code), error, **parts)

    return call


@pytest.fixture
def artifact(toy_artifact: Path, tmp_path: Path) -> Path:
    """The toy artifact with a manifest of its own; its folders are links until a test calls ``own``."""
    return linked(toy_artifact, tmp_path / "artifact")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Takes the place of ``load``, and of the pipeline that it gives."""
    from helpers.fake_pipeline import Fake
    from wanrun.generation import load

    fake = Fake(num_videos=1)
    monkeypatch.setattr(load, "load", fake.load)
    return fake


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a run goes as far as reading weights."""

    def read(*arguments: object) -> None:
        raise AssertionError("weights are read")

    from wanrun.weights import store as loader

    monkeypatch.setattr(loader, "Restore", read)
