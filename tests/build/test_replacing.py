"""Converting again: an artifact is replaced with --force, and what is still valid of it is kept."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from helpers.hub_server import read_folder
from helpers.manifests import with_model
from helpers.media_files import task_of
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion import component_plans
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import select_profile, select_target
from wanrun.errors import SourceError


def test_too_little_free_space_is_refused_early(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10_000_000))
    monkeypatch.setattr(component_plans, "ComponentWriter", None)  # not reached
    with refuses("no_space", SourceError, what=tmp_path, expected=" MB", found="10.0 MB") as caught:
        convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact"))
    assert caught.value.exit_code == 4
    assert 60 < float(str(caught.value.expected).split()[0]) < 70
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_artifact_is_replaced_only_with_force(toy_checkpoint: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "empty"
    artifact.mkdir()
    convert(ConvertRequest(toy_checkpoint, artifact))
    before = read_folder(artifact)
    with refuses("exists", what=artifact, remedy="--force"):
        convert(ConvertRequest(toy_checkpoint, artifact))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with refuses("exists", what=tmp_path / "photos"):
        convert(ConvertRequest(toy_checkpoint, tmp_path / "photos", force=True))
    assert (tmp_path / "photos" / "cat.jpg").exists() and read_folder(artifact) == before


TOY_DTYPES = {"transformer": "float32", "text_encoder": "float32"}  # those of the toy artifact


@pytest.mark.slow
def test_force_keeps_programs_and_executables_that_are_valid(artifact_copy: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "other", seed=1)
    before = read_manifest(artifact_copy)
    kept = {
        name: data
        for name, data in read_folder(artifact_copy).items()
        if name.startswith(("programs/", "executables/"))
    }
    assert kept
    after = convert(ConvertRequest(tmp_path / "other", artifact_copy, TOY_DTYPES, force=True))
    assert read_manifest(artifact_copy).as_json() == after.as_json()
    assert after.content_digest != before.content_digest
    assert (after.profiles, after.targets) == (before.profiles, before.targets)
    assert after.program_sets == before.program_sets
    assert (artifact_copy / "requirements.txt").is_file()
    files = read_folder(artifact_copy)
    assert {name: files.get(name) for name in kept} == kept
    profile = select_profile(Artifact(after, artifact_copy))
    assert profile.name == "96x64x9-b1-cfg"
    assert select_target(Artifact(after, artifact_copy), profile).mismatches == ()
    assert not after.golden  # recorded with other weights
    fresh = convert(ConvertRequest(tmp_path / "other", artifact_copy.with_name("fresh"), TOY_DTYPES))
    assert after.components == fresh.components


@pytest.mark.slow
def test_force_keeps_programs_of_what_programs_do_not_depend_on(
    artifact_copy: Path, toy_checkpoint: Path, tmp_path: Path
) -> None:
    """Another solver or shift is another table of numbers, which programs take as arguments, as defaults are.

    The folders of a read-only artifact are made anew.
    """
    before = read_manifest(artifact_copy)
    write_toy(tmp_path / "checkpoint", scheduler="euler", flow_shift=3.0)
    for path in [path for path in artifact_copy.rglob("*") if path.is_dir()]:
        path.chmod(0o555)
    after = convert(ConvertRequest(tmp_path / "checkpoint", artifact_copy, TOY_DTYPES, force=True))
    assert (after.model.defaults.solver, after.model.defaults.flow_shift) == ("euler", 3.0)
    assert after.configs["scheduler"] != before.configs["scheduler"]
    folders = [path for path in artifact_copy.rglob("*") if path.is_dir()]
    assert folders and all(path.stat().st_mode & stat.S_IWUSR for path in folders)
    with_model(before, {"num_steps": 3}).write(artifact_copy)
    kept = convert(ConvertRequest(toy_checkpoint, artifact_copy, TOY_DTYPES, force=True))
    assert kept.model == before.model
    for one in (after, kept):
        assert before.profiles and one.profiles == before.profiles
        assert (one.program_sets, one.targets) == (before.program_sets, before.targets)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["layers", "dtype", "task"])
def test_force_keeps_nothing_that_no_longer_fits(
    artifact_copy: Path, toy_checkpoint: Path, tmp_path: Path, other: str
) -> None:
    """Of a deeper model, of the default dtypes, and of a model that takes an image."""
    checkpoint = toy_checkpoint
    if other == "layers":
        write_toy(checkpoint := tmp_path / "deeper", configs={"transformer": {"num_layers": 4}})
    if other == "task":
        with_model(read_manifest(artifact_copy), task=task_of("wan2.2-ti2v")).write(artifact_copy)
    dtypes = {} if other == "dtype" else TOY_DTYPES
    after = convert(ConvertRequest(checkpoint, artifact_copy, dtypes, force=True))
    assert not after.profiles and not after.targets
    assert not (artifact_copy / "programs").exists() and not (artifact_copy / "executables").exists()


@pytest.mark.slow
def test_what_a_user_put_into_the_folder_is_not_deleted(
    artifact_copy: Path, toy_checkpoint: Path, tmp_path: Path
) -> None:
    given = [
        *("notes.txt", "videos/a.mp4", "weights/mine.txt", "golden/a.txt", "tokenizer/old/tokenizer.json"),
        *("weights/original/model.safetensors", "programs/mine.stablehlo", "executables/cpu/notes.txt"),
        "golden/.wan-models/a",
    ]
    for name in given:
        (artifact_copy / name).parent.mkdir(exist_ok=True)
        (artifact_copy / name).write_text("mine")
    before = read_folder(artifact_copy)
    first = "executables/cpu/notes.txt, golden/.wan-models/a, golden/a.txt"
    with refuses("exists", what=artifact_copy, found=f"{first} and 6 more"):
        convert(ConvertRequest(toy_checkpoint, artifact_copy, TOY_DTYPES, force=True))
    assert read_folder(artifact_copy) == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    for name in given:
        (artifact_copy / name).unlink()
    with refuses("exists", what=artifact_copy, found="videos"):
        convert(ConvertRequest(toy_checkpoint, artifact_copy, TOY_DTYPES, force=True))
    (artifact_copy / "videos").rmdir()
    # What a killed build leaves in the artifact's folders is no obstacle.
    (artifact_copy / "programs" / "96x64x9-b1-cfg" / "prepare-0123456789ab.stablehlo").touch()
    (artifact_copy / "executables" / ".wan-01234567-1-89abcdef").mkdir()
    convert(ConvertRequest(toy_checkpoint, artifact_copy, TOY_DTYPES, force=True))
