"""Of what is elsewhere a run fetches the files that it reads, and no other profile's or target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from helpers.damage import PROFILE, linked
from helpers.elsewhere import build_elsewhere, record_verdict
from helpers.manifests import plain_adapter, with_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import Embedding, Recorded
from wanrun.artifact.named import (
    ADAPTER,
    EMBEDDING,
    EXECUTABLE,
    GOLDEN,
    PROGRAM,
    REQUIREMENTS,
    TOKENIZER,
    VERDICT,
    WEIGHTS,
)
from wanrun.errors import ArtifactError
from wanrun.generation.needs import needed
from wanrun.text.embeddings import EmbeddingFormat
from wanrun.trust.verdict import Verdict, verdict_key


@pytest.fixture
def artifact(toy_artifact: Path) -> Artifact:
    """A manifest with two profiles, two targets of which one is not for this machine, and two embeddings."""
    here = open_artifact(toy_artifact)
    first = here.manifest.profiles[PROFILE]
    manifest = with_profiles(here.manifest, [first, replace(first, guidance=False, index=1)])
    (cpu,) = manifest.targets.values()
    environment = {**cpu.environment, "machine": "elsewhere"}
    other = replace(cpu, folder="executables/other", environment=environment)
    names = EmbeddingFormat(manifest)
    embeddings = {
        names.key(prompt, first.options.dtype): Embedding(
            file=f"embeddings/{prompt}.npy", sha256="0", prompt=prompt, dtype=first.options.dtype, length=1
        )
        for prompt in ("a cat", "blurry")
    }
    golden = {name: Recorded(file=f"golden/{name}.json", sha256="0") for name in manifest.profiles}
    changed = manifest.changed(
        targets={"cpu": cpu, "other": other},
        embeddings=embeddings,
        golden=golden,
        adapters={"style": plain_adapter("style")},
    )
    return Artifact(changed, toy_artifact)


def test_one_profile_of_one_target(artifact: Artifact) -> None:
    profile = artifact.manifest.profiles[PROFILE]
    names = needed(artifact, profiles=[profile], prompts=["a cat", "a dog"])
    executables = artifact.manifest.targets["cpu"].executables[PROFILE].values()
    assert {one.kind for one in names} == {WEIGHTS, TOKENIZER, PROGRAM, EXECUTABLE, EMBEDDING}
    assert {one.name for one in names if one.kind is EXECUTABLE} == {
        f"executables/cpu/{entry.file}" for entry in executables
    }
    programs = artifact.manifest.programs(artifact.manifest.targets["cpu"], profile).values()
    assert {one.name for one in names if one.kind is PROGRAM} == {program.file for program in programs}
    assert [one.name for one in names if one.kind is EMBEDDING] == ["embeddings/a cat.npy"]
    weights = [one for one in names if one.kind is WEIGHTS]
    assert {one.of for one in weights} == artifact.manifest.components.keys()


def test_all_profiles_of_the_target(artifact: Artifact) -> None:
    """Whatever is told of the next prompts."""
    names = {one.name for one in needed(artifact, {"prompts": ["a cat", "blurry"], "warn": print})}
    left = {one for one in artifact.named() if one.name not in names}
    assert {one.kind for one in left} == {EXECUTABLE, REQUIREMENTS, GOLDEN, ADAPTER}
    assert {one.of for one in left if one.kind is EXECUTABLE} == {"other"}


@pytest.mark.parametrize(("embeddings", "reads"), [("all", False), ("artifact", False), ("none", True)])
def test_the_text_encoder_is_for_other_prompts(artifact: Artifact, embeddings: str, reads: bool) -> None:
    names = needed(artifact, {"embeddings": embeddings}, prompts=["a  cat", "blurry"])
    assert ("text_encoder" in {one.of for one in names if one.kind is WEIGHTS}) == reads


def test_weights_that_are_elsewhere_are_not_read(artifact: Artifact) -> None:
    assert WEIGHTS not in {
        one.kind for one in needed(artifact, {"weights": str(artifact.folder / "weights")})
    }


def test_loras_that_are_chosen(artifact: Artifact) -> None:
    """All where nobody says which, if a profile has slots; none without."""
    manifest = artifact.manifest
    profiles = {
        name: replace(one, options=replace(one.options, lora_rank=8))
        for name, one in manifest.profiles.items()
    }
    adapters = {"style": plain_adapter("style"), "faces": plain_adapter("faces")}
    built = artifact.changed(profiles=profiles, adapters=adapters)

    def read(artifact: Artifact, **given: Any) -> set[str]:
        return {one.of for one in needed(artifact, **given) if one.kind is ADAPTER}

    assert read(built) == {"style", "faces"} and read(artifact) == set()
    assert read(built, loras=["style"]) == {"style"} and read(built, loras=()) == set()


def test_what_does_not_fit_is_refused_as_a_load_does(artifact: Artifact) -> None:
    with refuses("not_built", ArtifactError, what="v9", remedy="--target v9"):
        needed(artifact, {"target": "v9"})
    with refuses("unknown_parameter", what="'profiles'", remedy="profile"):
        needed(artifact, {"profiles": ["x"]})
    with refuses("invalid_value", what="'none'", expected="auto, low"):
        needed(artifact, {"memory": "none"})


def test_what_was_built_elsewhere_is_attested(toy_artifact: Path, tmp_path: Path) -> None:
    """A prompt of its own is encoded, whatever embeddings are stored; no recorded result is read."""
    elsewhere = linked(toy_artifact, tmp_path / "artifact")
    build_elsewhere(elsewhere)
    names = needed(elsewhere, prompts=[""])
    assert "text_encoder" in {one.of for one in names}
    assert not any(one.kind is GOLDEN for one in names)


def test_the_verdict_of_this_kind_of_machine(toy_artifact: Path, tmp_path: Path) -> None:
    folder, passed = linked(toy_artifact, tmp_path / "artifact"), Verdict(outcome="passed", reason="")
    build_elsewhere(folder)
    record_verdict(folder, passed, driver="580.1")
    own = verdict_key(record_verdict(folder, passed))
    artifact = open_artifact(folder)
    assert len(artifact.manifest.verdicts) == 2
    assert [one.of for one in needed(artifact) if one.kind is VERDICT] == [own]
