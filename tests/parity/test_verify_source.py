"""``wanbuild verify --source`` passes on the checkpoint an artifact was made from, and on no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import linked
from helpers.manifests import with_model, without_profiles
from helpers.pages import Seen
from wanbuild.check import reference
from wanbuild.cli import wanbuild
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.manifest import read_manifest

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = [
    pytest.mark.usefixtures("encoders_compiled_once"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
]

LATENTS = 1e-5
ALL = ["text_encoder", "transformer", "vae encode", "vae decode", "final latents", "video"]


def with_samples(*names: str) -> list[str]:
    """The checks of a model that is tried in several ways."""
    return [*ALL[:-2], *(f"{check} ({name})" for name in names for check in ALL[-2:])]


Verify = Callable[..., tuple[int, dict[str, Any], str]]
Toys = Callable[[str], tuple[Path, Path]]
STORED = ("transformer", "text_encoder", "image_encoder")


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


def test_one_transformer(toy_artifact: Path, toy_checkpoint: Path, verify: Verify, tmp_path: Path) -> None:
    code, checks, _ = verify(toy_artifact, toy_checkpoint, "--report", tmp_path / "r.html")
    page = Seen((tmp_path / "r.html").read_text())
    assert {row[4] for row in page.rows[1:]} == {"passed"} and len(page.rows) == 1 + len(ALL)
    assert "diffusers in float32" in page.rows[1][5]
    assert [one["class"] for one in page.all("img")] == ["sheet"] * 2  # ours and theirs
    assert code == 0 and list(checks) == sorted(ALL)
    assert checks["final latents"]["error"] < LATENTS and checks["final latents"]["note"] == "4 steps"


@pytest.mark.thorough
def test_two_experts(
    two_experts_artifact: Path, two_experts_checkpoint: Path, verify: Verify, tmp_path: Path
) -> None:
    """Both run, also where the model's own boundary gives all steps to one."""
    artifact = linked(two_experts_artifact, tmp_path / "artifact")
    manifest = read_manifest(artifact)
    with_model(manifest, options={**manifest.model.options, "boundary": 0.1}).write(artifact)
    code, checks, _ = verify(artifact, two_experts_checkpoint, "--steps", 2)
    assert code == 0 and list(checks) == sorted([*ALL, "transformer_2"])
    assert checks["final latents"]["error"] < LATENTS
    note = checks["final latents"]["note"]
    assert re.findall(r"[\d.]+ |[\d.]+$", note) == ["2 ", "1 ", "1 ", "0.8745"]
    assert " transformer " in note and " transformer_2" in note


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


@pytest.mark.thorough
def test_a_timestep_per_token(ti2v_artifact: Path, ti2v_checkpoint: Path, verify: Verify) -> None:
    """From text alone and from an image."""
    code, checks, _ = verify(ti2v_artifact, ti2v_checkpoint, "--steps", 2)
    assert code == 0 and list(checks) == sorted(with_samples("text", "image"))
    assert all(checks[f"final latents ({sample})"]["error"] < LATENTS for sample in ("text", "image"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("wan2.2-i2v", [*with_samples("first image", "both images"), "transformer_2"]),
        ("wan2.2-vace", [*with_samples("no video", "video"), "transformer_2"]),
        ("wan2.2-animate", [*with_samples("animate", "replace"), "image_encoder"]),
    ],
)
def test_with_images_and_videos(media_toy: Toys, verify: Verify, variant: str, expected: list[str]) -> None:
    """Every kind of sample."""
    checkpoint, artifact = media_toy(variant)
    code, checks, _ = verify(artifact, checkpoint, "--steps", 2)
    assert code == 0 and list(checks) == sorted(expected)
    assert all(c["error"] < LATENTS for name, c in checks.items() if name.startswith("final latents"))


def test_several_videos_that_the_reference_cannot_make(
    media_toy: Toys, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, built = media_toy("wan2.1-vace")
    artifact = linked(built, tmp_path / "artifact")
    manifest = read_manifest(artifact)
    two = msgspec.structs.replace(next(iter(manifest.profiles.values())), index=0, num_videos=2)
    without_profiles(manifest).changed(profiles={two.name: two}).write(artifact)
    monkeypatch.setattr(reference, "Reference", lambda *_: pytest.fail("the reference is loaded"))
    code, checks, error = verify(artifact, checkpoint)
    assert (code, checks) == (2, {})
    assert re.search(r"\b1 .*wan2\.1-vace", error) and two.name in error


def test_another_seed(toy_artifact: Path, verify: Verify, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_toy(other, "wan2.1-t2v", seed=1)
    code, checks, error = verify(toy_artifact, other, "--steps", 1)
    assert (code, checks) == (1, {})
    assert failed(error) == ALL
