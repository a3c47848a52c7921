"""``wanbuild verify --source`` passes on the checkpoint an artifact was made from, and on no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from damage import linked
from wanbuild.cli import wanbuild
from wanbuild.toy import write_toy
from wanrun.console import run
from wanrun.manifest import read_manifest

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

LATENTS = 1e-5
ALL = ["text_encoder", "transformer", "vae encode", "vae decode", "final latents", "video"]

Verify = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On arrays this small more threads of torch take five times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs the command here; returns its exit code, the checks, and the error."""

    def call(artifact: Path, source: Path, *options: object) -> tuple[int, dict[str, Any], str]:
        outcome = tmp_path / "parity.json"
        arguments = ["verify", "--artifact", artifact, "--source", source, "--json", outcome, *options]
        capsys.readouterr()
        code = run(wanbuild, [str(argument) for argument in arguments])
        printed = capsys.readouterr()
        print(printed.out, flush=True)
        checks = json.loads(outcome.read_text()) if outcome.exists() else {}
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        return code, checks, "".join(errors)

    return call


def failed(error: str) -> list[str]:
    """The checks that the error says have failed."""
    what, _, rest = error.partition(": the artifact differs from the reference: ")
    assert what == "error"
    return [part.rsplit(" ", 3)[0] for part in rest.split("; ")[0].split(", ")]


def test_one_transformer(toy_artifact: Path, toy_checkpoint: Path, verify: Verify) -> None:
    code, checks, _ = verify(toy_artifact, toy_checkpoint)
    assert code == 0 and list(checks) == sorted(ALL)
    assert checks["final latents"]["error"] < LATENTS and checks["final latents"]["note"] == "4 steps"


def test_two_experts(
    two_experts_artifact: Path, two_experts_checkpoint: Path, verify: Verify, tmp_path: Path
) -> None:
    """Both run, also where the model's own boundary gives all steps to one."""
    artifact = linked(two_experts_artifact, tmp_path / "artifact")
    manifest = read_manifest(artifact)
    manifest.changed(model={**manifest.model, "boundary_ratio": 0.1}).write(artifact)
    code, checks, _ = verify(artifact, two_experts_checkpoint, "--steps", 2)
    assert code == 0 and list(checks) == sorted([*ALL, "transformer_2"])
    assert checks["final latents"]["error"] < LATENTS
    assert checks["final latents"]["note"] == (
        "2 steps, 1 of transformer and 1 of transformer_2, boundary 0.8745"
    )


def test_swapped_experts(
    two_experts_artifact: Path, two_experts_checkpoint: Path, verify: Verify, tmp_path: Path
) -> None:
    """A checkpoint that differs in nothing but which expert is which."""
    source = tmp_path / "swapped"
    shutil.copytree(two_experts_checkpoint, source)
    (source / "transformer").rename(source / "other")
    (source / "transformer_2").rename(source / "transformer")
    (source / "other").rename(source / "transformer_2")
    code, checks, error = verify(two_experts_artifact, source)
    assert (code, checks) == (1, {})
    assert failed(error) == ["transformer", "transformer_2", "final latents", "video"]


def test_a_timestep_per_token(ti2v_artifact: Path, ti2v_checkpoint: Path, verify: Verify) -> None:
    code, checks, _ = verify(ti2v_artifact, ti2v_checkpoint)
    assert code == 0 and list(checks) == sorted(ALL)
    assert checks["final latents"]["error"] < LATENTS


def test_another_seed(ti2v_artifact: Path, verify: Verify, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_toy(other, "wan2.2-ti2v", seed=1)
    code, checks, error = verify(ti2v_artifact, other, "--steps", 1)
    assert (code, checks) == (1, {})
    assert failed(error) == ALL
