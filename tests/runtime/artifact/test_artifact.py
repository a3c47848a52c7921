"""An artifact's files: named, grouped, read whole or compared; with profiles that lie elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from helpers.damage import PROFILE, flip, linked, own
from helpers.elsewhere import build_elsewhere, record_verdict
from helpers.manifests import put_adapter, with_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact, groups, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.named import EXECUTABLE, GOLDEN, KINDS, PROGRAM, REQUIREMENTS, TOKENIZER, WEIGHTS, Named
from wanrun.artifact.overlay import merged_of, overlaid, overlay_of
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.trust.verdict import Verdict

# --- artifact ---


@pytest.fixture
def artifact(toy_artifact: Path) -> Artifact:
    return open_artifact(toy_artifact)


@pytest.mark.slow
def test_the_files_are_those_of_the_folder(artifact: Artifact) -> None:
    """But for the manifest, and for Orbax's metadata, which follows from it."""
    named, folder = {one.name: one for one in artifact.named()}, artifact.folder
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    metadata = {name for name in there if name.endswith(("zarr.json", "_METADATA", "_CHECKPOINT_METADATA"))}
    assert named.keys() == there - metadata - {"manifest.json"}
    assert all(one.nbytes in (None, (folder / name).stat().st_size) for name, one in named.items())
    for one in named.values():
        kind = one.kind
        assert one.name.startswith(kind.folder) and (one.parameter is not None) == (kind is WEIGHTS)
    assert {one.of for one in named.values() if one.kind is WEIGHTS} == artifact.manifest.components.keys()
    assert {one.of for one in named.values() if one.kind in (EXECUTABLE, REQUIREMENTS)} == {"cpu"}
    assert {one.of for one in named.values() if one.kind is PROGRAM} == artifact.manifest.program_sets.keys()


def test_the_files_of_a_parameter_are_one_group(artifact: Artifact) -> None:
    found = groups(reversed(list(artifact.named())))
    assert sum(map(len, found)) == len({one.name for one in artifact.named()})
    for group in found:
        assert [one.index for one in group] == list(range(len(group)))
        if (parameter := group[0].parameter) is not None:
            assert len(group) == parameter.layout.chunks


def test_some_targets_and_profiles_alone(artifact: Artifact) -> None:
    manifest = artifact.manifest
    (cpu,) = manifest.targets.values()
    (own,) = manifest.program_sets.values()
    second = replace(manifest.profiles[PROFILE], guidance=False, index=1)
    more = with_profiles(manifest, [manifest.profiles[PROFILE], second])
    other = replace(own, mesh={"context": 2})
    set_of = {**more.program_sets, other.key: replace(other, programs={})}
    both = Artifact(
        more.changed(
            targets={
                **more.targets,
                "b": replace(cpu, program_set=other.key, folder="executables/b", executables={}),
            },
            program_sets=set_of,
        ),
        artifact.folder,
    )
    assert both.only() is both
    one = both.only(targets=["CPU"])
    assert one.manifest.targets.keys() == {"cpu"} and other.key not in one.manifest.program_sets
    assert one.manifest.components == manifest.components and one.folder == artifact.folder
    less = both.only(targets=["cpu"], profiles=[PROFILE])
    assert less.manifest.profiles.keys() == less.manifest.targets["cpu"].executables.keys() == {PROFILE}
    assert less.manifest.targets["cpu"].statistics.keys() <= {PROFILE}
    assert {named.kind for named in both.only(profiles=[]).named()} == {WEIGHTS, TOKENIZER, REQUIREMENTS}
    with refuses("unknown_name", what="v9", expected="cpu, b"):
        both.only(targets=["cpu", "v9"])


def test_files_are_compared_whether_they_are_there_or_not(artifact: Artifact, tmp_path: Path) -> None:
    folder = linked(artifact.folder, tmp_path / "artifact")
    own(folder, "tokenizer")
    copied = open_artifact(folder, "file:///elsewhere")
    copied.check_all(copied.named())
    assert copied.whole(copied.named()) and copied.influences == {"artifact": "file:///elsewhere"}
    (folder / copied.manifest.tokenizer.file).unlink()
    copied.check_all(copied.named(), missing=True)
    assert not copied.whole(copied.named()) and GOLDEN not in {one.kind for one in copied.named()}
    with refuses("damaged", ArtifactError, what=copied.manifest.tokenizer.file, found="No such file"):
        copied.check_all(copied.named())


# --- named ---


def test_a_file_is_read_if_it_is_the_one(tmp_path: Path) -> None:
    """One of a kind whose size no manifest says; a pipe is not waited for."""
    path, data = tmp_path / "requirements.txt", b"jax==1"
    path.write_bytes(data)
    named = Named(REQUIREMENTS, path.name, "cpu", sha256_of(data))
    assert named.read(path) == data and named.check(path) == []
    assert named.group == named.name and named.most == REQUIREMENTS.most
    for damage, found in (
        (lambda: path.write_bytes(b"jax==2"), sha256_of(b"jax==2")),
        (lambda: os.truncate(path, REQUIREMENTS.most + 1), str(REQUIREMENTS.most)),
        (path.unlink, "No such file or directory"),
        (path.mkdir, "Is a directory"),
    ):
        damage()
        for look in (named.read, named.check):
            with refuses("damaged", ArtifactError, what=path, found=found, remedy=REQUIREMENTS.remedy):
                look(path)
    path.rmdir()
    os.mkfifo(path)
    with refuses("damaged", ArtifactError, what=path, expected="a file"):
        named.check(path)


@pytest.mark.parametrize("offset", [0, -1])
def test_each_kind_of_file_of_an_artifact(toy_artifact: Path, tmp_path: Path, offset: int) -> None:
    """A bit of the first and of the last byte; of weights that is the checksum behind the rows."""
    folder = linked(toy_artifact, tmp_path / "artifact")
    put_adapter(folder)
    build_elsewhere(folder)
    record_verdict(folder, Verdict(outcome="passed", reason=""))
    artifact = open_artifact(folder)
    first = {one.kind: one for one in reversed(list(artifact.named()))}
    assert first.keys() >= {kind for kind in KINDS if kind.folder not in ("golden", "embeddings")}
    for place in {one.name.partition("/")[0] for one in first.values()}:
        own(folder, place)
    for kind, one in first.items():
        path = artifact.path(one)
        one.check(path)
        flip(path, offset % path.stat().st_size)
        digest = "crc32c" if kind is WEIGHTS else "sha256"
        with refuses("damaged", ArtifactError, what=kind.what, expected=digest, remedy=kind.remedy):
            one.check(path, "it")
        if kind is not WEIGHTS:
            with refuses("damaged", ArtifactError, what=kind.what):
                one.read(path)


# --- overlay ---


NAME = "192x64x9-b1-cfg"


def beside(artifact: Artifact) -> Path:
    """Writes a manifest of the artifact's programs for another profile too; returns its folder."""
    folder, manifest = overlay_of(artifact.manifest).make(), artifact.manifest
    (old,) = manifest.profiles.values()
    sets = {
        key: structs.replace(one, programs={NAME: one.programs[old.name]})
        for key, one in manifest.program_sets.items()
    }
    targets = {
        key: structs.replace(one, executables={NAME: one.executables[old.name]})
        for key, one in manifest.targets.items()
    }
    profiles = {NAME: structs.replace(old, width=192)}
    manifest.changed(profiles=profiles, program_sets=sets, targets=targets, golden={}).write(folder)
    return folder


def test_profiles_come_after_the_artifact_s_own(artifact: Artifact) -> None:
    assert overlaid(artifact) is artifact
    folder = beside(artifact)
    found = overlaid(artifact)
    assert list(found.manifest.profiles) == [*artifact.manifest.profiles, NAME]
    assert max(found.manifest.profiles.values(), key=lambda one: one.index).name == NAME
    assert found.manifest.digests == artifact.manifest.digests and found.alone.manifest == artifact.manifest
    assert overlaid(found) is found
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"width": 192', b'"width": 208'))
    assert overlaid(artifact) is artifact


def test_a_file_that_is_gone_names_the_build(artifact: Artifact) -> None:
    folder = beside(artifact)
    (old,) = artifact.manifest.profiles
    there = open_artifact(folder).manifest
    key, sets = next(iter(there.program_sets.items()))
    moved = structs.replace(
        sets.programs[NAME]["prepare"], file="programs/new/prepare-0123456789ab.stablehlo"
    )
    path = folder / moved.file
    path.parent.mkdir(parents=True)
    path.write_bytes(artifact.program(sets.programs[NAME]["prepare"]))
    changed = structs.replace(sets, programs={NAME: {**sets.programs[NAME], "prepare": moved}})
    there.changed(program_sets={**there.program_sets, key: changed}).write(folder)
    found = overlaid(artifact)
    assert artifact.program(sets.programs[NAME]["prepare"]) == found.program(moved)
    path.unlink()  # the folder was removed, to make room
    with pytest.raises(ArtifactError) as gone:
        found.program(moved)
    assert gone.value.fields == ("build",) and str(folder) in str(gone.value.remedy)
    (named,) = [one for one in found.named() if one.name == moved.file]
    with pytest.raises(ArtifactError) as checked:
        found.check([named])
    assert checked.value.remedy == gone.value.remedy
    assert overlaid(artifact) is artifact and old in artifact.manifest.profiles  # so that it is built again


def test_executables_of_another_environment_are_not_mixed(artifact: Artifact) -> None:
    targets = artifact.manifest.targets
    other = {
        name: structs.replace(one, options={"xla_other": True}, executables={})
        for name, one in targets.items()
    }
    assert merged_of(artifact.manifest, artifact.manifest.changed(targets=other)).targets == targets
