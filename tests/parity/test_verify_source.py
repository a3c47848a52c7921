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

from helpers.artifacts import with_cpu_levels
from helpers.checkpoint_files import as_first_uploaded
from helpers.damage import linked
from helpers.manifests import with_model, without_profiles
from helpers.pages import Seen
from wanbuild.check import reference
from wanbuild.cli import wanbuild
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.machine.cpu import cpu_level_rank

pytestmark = pytest.mark.usefixtures("encoders_compiled_once")

LATENTS = 1e-5
ALL = ["text_encoder", "transformer", "vae encode", "vae decode", "final latents", "video"]


def with_samples(*names: str) -> list[str]:
    """The checks of a model that is tried in several ways, or in the only one."""
    if not names:
        return ALL
    return [*ALL[:-2], *(f"{check} ({name})" for name in names for check in ALL[-2:])]


Verify = Callable[..., tuple[int, dict[str, Any], str]]
Toys = Callable[[str], tuple[Path, Path]]


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
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("variant", "samples", "more"),
    [
        ("wan2.2-ti2v", ("text", "image"), ()),
        ("wan2.2-i2v", ("first image", "both images"), ("transformer_2",)),
        ("wan2.2-vace", ("no video", "video"), ("transformer_2",)),
        ("wan2.2-animate", ("animate", "replace"), ("image_encoder",)),
        ("anyflow-wan2.1", (), ()),
        ("anyflow-far-wan2.1", ("text", "image"), ()),  # the velocity is that of the first chunk
    ],
)
def test_every_kind_of_sample(
    toy_of: Toys,
    verify: Verify,
    tmp_path: Path,
    variant: str,
    samples: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    """Whole videos from all that a model takes; AnyFlow's checkpoint is as NVlabs uploaded it first."""
    source, artifact = toy_of(variant)
    if variant == "anyflow-wan2.1":
        source = as_first_uploaded(source, tmp_path / "first")
    code, checks, _ = verify(artifact, source, "--steps", 2)
    assert code == 0 and list(checks) == sorted([*with_samples(*samples), *more])
    assert all(c["error"] < LATENTS for name, c in checks.items() if name.startswith("final latents"))


@pytest.fixture(scope="module")
def levels(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_cpu_levels(toy_checkpoint, tmp_path_factory)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CPU_LEVELS)
def test_a_cpu_level(levels: Path, toy_checkpoint: Path, verify: Verify, tmp_path: Path, name: str) -> None:
    """The executables of every level that can be built here, against diffusers in float32."""
    manifest = read_manifest(levels)
    if name not in manifest.targets:
        pytest.skip(f"this CPU has no {name}")
    artifact = linked(levels, tmp_path / "toy")
    manifest.changed(targets={name: manifest.targets[name]}).write(artifact)
    code, checks, _ = verify(artifact, toy_checkpoint, "--steps", 3)
    assert code == 0 and all(check["error"] <= LATENTS for check in checks.values())


@pytest.mark.thorough
def test_sizes_and_ranks_of_cpu_levels(levels: Path) -> None:
    """Levels share their programs where their products are alike; each has entries of its own."""
    manifest = read_manifest(levels)
    targets = [manifest.targets[name] for name in CPU_LEVELS if name in manifest.targets]
    assert sorted(targets, key=lambda target: cpu_level_rank(target.environment)) == targets
    for target in targets:
        files = list((levels / target.folder).glob("*-cache"))
        entries = [entry for kind in target.executables.values() for entry in kind.values()]
        assert {file.name for file in files} == {entry.file for entry in entries}
        assert sum(entry.nbytes for entry in entries) > 100_000


def test_several_videos_that_the_reference_cannot_make(
    toy_of: Toys, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, built = toy_of("wan2.1-vace")
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
