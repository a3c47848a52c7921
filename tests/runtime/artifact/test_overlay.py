"""Profiles beside an artifact: read after it; what was changed is as if it were not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.overlay import merged_of, overlaid, overlay_of
from wanrun.errors import ArtifactError

NAME = "192x64x9-b1-cfg"


@pytest.fixture
def own(toy_artifact: Path) -> Artifact:
    return open_artifact(toy_artifact)


def beside(own: Artifact) -> Path:
    """Writes a manifest of the artifact's programs for another profile too; returns its folder."""
    folder, manifest = overlay_of(own.manifest).make(), own.manifest
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


def test_profiles_come_after_the_artifact_s_own(own: Artifact) -> None:
    assert overlaid(own) is own
    folder = beside(own)
    found = overlaid(own)
    assert list(found.manifest.profiles) == [*own.manifest.profiles, NAME]
    assert max(found.manifest.profiles.values(), key=lambda one: one.index).name == NAME
    assert found.manifest.digests == own.manifest.digests and found.alone.manifest == own.manifest
    assert overlaid(found) is found
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"width": 192', b'"width": 208'))
    assert overlaid(own) is own


def test_a_file_that_is_gone_names_the_build(own: Artifact) -> None:
    folder = beside(own)
    (old,) = own.manifest.profiles
    there = open_artifact(folder).manifest
    key, sets = next(iter(there.program_sets.items()))
    moved = structs.replace(
        sets.programs[NAME]["prepare"], file="programs/new/prepare-0123456789ab.stablehlo"
    )
    path = folder / moved.file
    path.parent.mkdir(parents=True)
    path.write_bytes(own.program(sets.programs[NAME]["prepare"]))
    changed = structs.replace(sets, programs={NAME: {**sets.programs[NAME], "prepare": moved}})
    there.changed(program_sets={**there.program_sets, key: changed}).write(folder)
    found = overlaid(own)
    assert own.program(sets.programs[NAME]["prepare"]) == found.program(moved)
    path.unlink()  # the folder was removed, to make room
    with pytest.raises(ArtifactError) as gone:
        found.program(moved)
    assert gone.value.fields == ("build",) and str(folder) in str(gone.value.remedy)
    (named,) = [one for one in found.named() if one.name == moved.file]
    with pytest.raises(ArtifactError) as checked:
        found.check([named])
    assert checked.value.remedy == gone.value.remedy
    assert overlaid(own) is own and old in own.manifest.profiles  # so that it is built again


def test_executables_of_another_environment_are_not_mixed(own: Artifact) -> None:
    targets = own.manifest.targets
    other = {
        name: structs.replace(one, options={"xla_other": True}, executables={})
        for name, one in targets.items()
    }
    assert merged_of(own.manifest, own.manifest.changed(targets=other)).targets == targets
