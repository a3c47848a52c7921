"""An artifact names every one of its files, alone or with what belongs to some targets and profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from helpers.damage import PROFILE, linked, own
from helpers.manifests import with_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact, groups, open_artifact
from wanrun.artifact.named import EXECUTABLE, GOLDEN, PROGRAM, REQUIREMENTS, TOKENIZER, WEIGHTS
from wanrun.errors import ArtifactError


@pytest.fixture
def artifact(toy_artifact: Path) -> Artifact:
    return open_artifact(toy_artifact)


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
