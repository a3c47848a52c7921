"""A machine that the artifact was not built for: every mismatch in one line, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.damage import (
    Declines,
    edit_environment,
)
from helpers.fake_pipeline import Fake, run_here
from helpers.refusals import check_json
from helpers.terminal import complaints
from wanbuild.targets.topology import COMPILERS
from wancli.console import run
from wancli.run import wanrun
from wanrun.artifact.manifest import read_manifest
from wanrun.machine.cpu import cpu_features, highest_cpu_level
from wanrun.machine.environment import has_package

LEVEL = highest_cpu_level(cpu_features())
COMPILE_HERE = "run wanbuild compile on this CPU" + (
    f", or with --target {LEVEL} on another CPU of that level" if LEVEL else ""
)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"machine": "riscv64"}, ["machine: ", "riscv64"]),
        ({"platform_version": "axon"}, ["platform version: ", "axon"]),
        ({"device_kind": "TPU v9"}, ["device kind: ", "TPU v9", "found cpu "]),
        ({"cpu_features": ["avx", "warp_drive"]}, [" warp_drive,", COMPILE_HERE]),
        ({"variables": {"XLA_FLAGS": "--xla_x=1"}}, ["XLA_FLAGS: ", "'--xla_x=1'", "''"]),
    ],
)
@pytest.mark.usefixtures("no_weights_are_read")
def test_one_fact_that_differs(
    declines: Declines, artifact: Path, facts: dict[str, Any], words: list[str]
) -> None:
    edit_environment(artifact, **facts)
    told = declines(artifact, "wrong_machine", message=(" cpu ", *words))
    assert told["message"].count("expected") == 1  # and nothing else


@pytest.mark.usefixtures("no_weights_are_read")
def test_every_fact_that_differs_is_in_one_line(declines: Declines, artifact: Path) -> None:
    packages = read_manifest(artifact).targets["cpu"].environment["packages"]
    edit_environment(
        artifact,
        packages={**packages, "jaxlib": "0.4.1", "jax": "0.4.2", "libtpu": "0.0.1"},
        cpu_features=["warp_drive"],
    )
    line = declines(artifact, "wrong_machine")["message"]
    install = f"pip install -r {artifact / 'requirements.txt'}"
    for words in (
        (" jaxlib:", "0.4.1", packages["jaxlib"], install, "wanbuild compile"),
        (" jax:", "0.4.2", packages["jax"], install, "wanbuild compile"),
        (" warp_drive,",),
    ):
        assert any(all(word in part for word in words) for part in line.split("; ")), (words, line)
    assert "libtpu" not in line  # which no program of a CPU depends on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "package"),
    [
        ("--xla_warp_drive=1", False),  # XLA does not know it, and would end the process, were it started
        ("--xla_force_host_platform_device_count=2", True),
    ],
)
def test_drifted_flags(cli: Any, artifact: Path, tmp_path: Path, flags: str, package: bool) -> None:
    if package:
        packages = read_manifest(artifact).targets["cpu"].environment["packages"]
        edit_environment(artifact, packages={**packages, "jaxlib": "0.4.1"})
    output = tmp_path / "o.npy"
    command = ("wanrun", "--artifact", artifact, "--prompt", "a fox", "--output", output)
    line = cli.fails(3, *command, XLA_FLAGS=flags)
    assert line.count("expected") == 1 + package
    assert "XLA_FLAGS: " in line and f"'{flags}'" in line and ("0.4.1" in line) == package


def no_device(cli: Any, code: int, *command: Any, message: str = "cpu", platform: str = "cuda") -> None:
    """Checks the last line of a command that fails. Where JAX_PLATFORMS names the platform of a compiler that
    is installed and finds no chip, that has its own words before."""
    result = cli(*command, "--json-errors", JAX_PLATFORMS=platform)
    assert (result.returncode, result.stdout) == (code, "")
    *before, line = (text for text in complaints(result.stderr) if not text.startswith("warning: "))
    assert not any(text.startswith(("error:", '{"error"')) for text in before)
    if not any(has_package(packages[0]) for _, packages in COMPILERS.values()):
        assert before == []
    parts = {"found": f"JAX_PLATFORMS='{platform}'", "remedy": "unset JAX_PLATFORMS"}
    check_json(line, "wrong_machine", message=message, **parts)


@pytest.mark.slow
@pytest.mark.parametrize(("named", "option"), [("cuda", "--overwrite"), ("tpu", "--allow-compile")])
def test_no_such_platform(cli: Any, toy_artifact: Path, tmp_path: Path, named: str, option: str) -> None:
    command = ("wanrun", "--artifact", toy_artifact, "--prompt", "a fox", "--output", tmp_path / "o.npy")
    no_device(cli, 3, *command, option, platform=named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_no_such_platform_to_build_on(cli: Any, artifact: Path) -> None:
    before = (artifact / "manifest.json").read_bytes()
    no_device(cli, 2, "wanbuild", "compile", "--artifact", artifact, "--target", "cpu", message="target cpu")
    no_device(cli, 2, "wanbuild", "compile", "--artifact", artifact, message="target local")
    no_device(cli, 3, "wanbuild", "embed", "--artifact", artifact, "--prompt", "new")
    for option in ((), ("--record",)):  # before a weight is read
        no_device(cli, 3, "wanbuild", "verify", "--artifact", artifact, *option, message="JAX may use")
    assert (artifact / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("many", [False, True])
def test_no_ffmpeg_is_found_before_the_work(
    many: bool,
    fake: Fake,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    (tmp_path / "prompts.txt").write_text("a fox\nsnow\n")
    prompts = ["--prompts", tmp_path / "prompts.txt"] if many else ["--prompt", "a fox"]
    failed = run_here(capsys, artifact, *prompts, "--output", tmp_path / "o.mp4", "--json-errors")
    assert failed.code == 2 and fake.loads == []
    (line,) = failed.err
    remedy = "pip install imageio-ffmpeg", ".webp or .png"
    check_json(line, "not_installed", message="mp4", found="IMAGEIO_FFMPEG_EXE=", remedy=remedy)
    assert not list(tmp_path.glob("*.mp4"))
    assert run_here(capsys, artifact, *prompts, "--output", tmp_path / "o.webp").code == 0
    assert len(list(tmp_path.glob("*.webp"))) == 1 + many


@pytest.mark.slow
@pytest.mark.parametrize(("options", "warnings"), [([], 1), (["--no-embedding-cache"], 0)])
def test_a_user_without_a_home(
    toy_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    warnings: int,
) -> None:
    """As in a container that runs as any user id."""

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    video = str(tmp_path / "o.npy")
    assert (
        run(wanrun, [str(toy_artifact), "--prompt", "a fox", "--steps", "1", "--output", video, *options])
        == 0
    )
    said = capsys.readouterr().err
    assert said.count("/dev/null") == said.count("warning: ") == warnings
    assert "error" not in said
