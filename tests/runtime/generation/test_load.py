"""What is loaded: the profile, what of it is tried before, its files, and what processes agree on."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

import wanrun
from helpers.damage import PROFILE, linked
from helpers.elsewhere import build_elsewhere, record_verdict
from helpers.manifests import plain_adapter, with_profiles
from helpers.options import PROFILE as BUILT
from helpers.options import generation, options
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import Embedding, Recorded, read_manifest
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
from wanrun.artifact.programs import Profile
from wanrun.cluster.process_group import ProcessGroup
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, WanError
from wanrun.generation.agreement import agree_on_generation, together
from wanrun.generation.choice import Choice
from wanrun.generation.load import LoadKeywords, on_device
from wanrun.generation.needs import needed
from wanrun.opened import device as device_module
from wanrun.opened.policy import LoadPolicy
from wanrun.text.embeddings import EmbeddingFormat
from wanrun.timing.timings import Timings
from wanrun.trust import trial
from wanrun.trust.verdict import Verdict, verdict_key
from wanrun.weights import readahead as ahead_module
from wanrun.weights.store import WeightStore


def test_help_shows_every_keyword_with_its_default() -> None:
    parameters = inspect.signature(wanrun.load).parameters
    assert list(parameters) == ["artifact", *LoadKeywords.__struct_fields__]
    assert parameters["verify"].default == "fast" and parameters["prompts"].default is None
    assert set(LoadPolicy.__struct_fields__) < set(parameters)


@pytest.mark.slow
def test_weights_are_read_while_a_device_starts_slowly(
    toy_artifact: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = list[str](), device_module.open_devices

    def start(*arguments: Any, **options: Any) -> Any:
        read.extend(reads)
        return real(*arguments, **options)

    monkeypatch.setattr(device_module, "open_devices", start)
    with wanrun.load(toy_artifact, prompts=["a fox"], embeddings="none") as quick:
        assert read == [] and reads == ["text_encoder", "transformer"]
        expected = quick.generate("a fox", num_steps=1).latents
    reads.clear()
    monkeypatch.setattr(ahead_module, "SLOW", {"cpu"})
    with wanrun.load(toy_artifact, prompts=["a fox"], embeddings="none") as slow:
        assert read == ["transformer"] and reads == ["transformer", "text_encoder"]
        assert np.array_equal(slow.generate("a fox", num_steps=1).latents, expected)


# The profile, and what of it is tried.


PASSED = Verdict(outcome="passed", reason="", device_kind="cpu", platform_version="cpu")


class Noting:
    """A group that notes what is to be agreed on."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def agree_on_artifact(self, facts: dict[str, Any]) -> None:
        self.facts.append(facts)

    agree_on_request = agree_on_artifact


def opened(
    artifact: Path, lines: list[str], group: object = None, later: Sequence[str] = (), **policy: Any
) -> tuple[WeightStore, Profile]:
    group = cast(ProcessGroup, group)
    given = LoadKeywords(warn=lines.append, report=lines.append, group=group, later=later)
    choice = Choice(open_artifact(artifact), LoadPolicy(**policy))
    with contextlib.ExitStack() as undo:
        return on_device(choice, given, Timings(), undo)[0], choice.profile


@pytest.mark.parametrize(
    ("policy", "code", "parts"),
    [
        ({"profile": "x"}, "unknown_name", {"what": "'x'", "expected": PROFILE}),
        ({"profile": PROFILE, "num_videos": 2}, "conflict", {"what": "num_videos"}),
        ({"size": (32, 32)}, "not_built", {"what": "32x32"}),
        ({"profile": PROFILE, "size": (96, 64)}, "conflict", {"what": "size"}),
    ],
)
def test_the_profile_that_is_wanted(
    toy_artifact: Path, policy: dict[str, Any], code: ErrorCode, parts: dict[str, str]
) -> None:
    artifact = open_artifact(toy_artifact)
    for given in ({}, {"profile": PROFILE}):
        assert Choice(artifact, LoadPolicy(**given)).profile.name == PROFILE
    with refuses(code, WanError, **parts):
        _ = Choice(artifact, LoadPolicy(**policy)).profile


def test_without_guidance_in_any_profile_there_is_none(toy_artifact: Path) -> None:
    artifact = open_artifact(toy_artifact)
    (profile,) = artifact.manifest.profiles.values()
    without = with_profiles(artifact.manifest, [replace(profile, guidance=False)])
    plain = Artifact(without, toy_artifact)
    assert not Choice(plain, LoadPolicy()).profile.guidance
    assert Choice(artifact, LoadPolicy()).profile.guidance
    with refuses("not_built", ArtifactError, expected="-nocfg", remedy=" --guidance"):
        _ = Choice(plain, LoadPolicy(guidance=True)).profile


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the place of the child: it finds everything right."""
    code = f"import sys; open(sys.argv[-1], 'wb').write({PASSED.encoded()!r})"
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))


@pytest.mark.usefixtures("passing")
def test_what_is_needed_later_is_tried_ahead(elsewhere: Path) -> None:
    manifest = read_manifest(elsewhere)
    first = manifest.profiles[PROFILE]
    second = replace(first, guidance=False, index=1)
    with_profiles(manifest, [first, second]).write(elsewhere)
    lines: list[str] = []
    later = [first.name, second.name, second.name]
    opened(elsewhere, lines, later=later, lazy=True)
    assert len(lines) == 4 and all("target v9" in line for line in lines[::2])
    del lines[:]
    weights, profile = opened(elsewhere, lines, lazy=True)
    weights.opened.check_trust(second)
    assert profile == first and weights.opened.environment["platform_version"] == "cpu" and lines == []


def test_several_processes_try_nothing(elsewhere: Path) -> None:
    with refuses("wrong_machine", ArtifactError, what="target v9", remedy="--target local"):
        opened(elsewhere, [], Noting())


# Files of what is elsewhere.


@pytest.fixture
def several(toy_artifact: Path) -> Artifact:
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


def test_one_profile_of_one_target(several: Artifact) -> None:
    profile = several.manifest.profiles[PROFILE]
    names = needed(several, profiles=[profile], prompts=["a cat", "a dog"])
    executables = several.manifest.targets["cpu"].executables[PROFILE].values()
    assert {one.kind for one in names} == {WEIGHTS, TOKENIZER, PROGRAM, EXECUTABLE, EMBEDDING}
    assert {one.name for one in names if one.kind is EXECUTABLE} == {
        f"executables/cpu/{entry.file}" for entry in executables
    }
    programs = several.manifest.programs(several.manifest.targets["cpu"], profile).values()
    assert {one.name for one in names if one.kind is PROGRAM} == {program.file for program in programs}
    assert [one.name for one in names if one.kind is EMBEDDING] == ["embeddings/a cat.npy"]
    weights = [one for one in names if one.kind is WEIGHTS]
    assert {one.of for one in weights} == several.manifest.components.keys()


def test_all_profiles_of_the_target(several: Artifact) -> None:
    """Whatever is told of the next prompts."""
    names = {one.name for one in needed(several, {"prompts": ["a cat", "blurry"], "warn": print})}
    left = {one for one in several.named() if one.name not in names}
    assert {one.kind for one in left} == {EXECUTABLE, REQUIREMENTS, GOLDEN, ADAPTER}
    assert {one.of for one in left if one.kind is EXECUTABLE} == {"other"}


@pytest.mark.parametrize(("embeddings", "reads"), [("all", False), ("artifact", False), ("none", True)])
def test_the_text_encoder_is_for_other_prompts(several: Artifact, embeddings: str, reads: bool) -> None:
    names = needed(several, {"embeddings": embeddings}, prompts=["a  cat", "blurry"])
    assert ("text_encoder" in {one.of for one in names if one.kind is WEIGHTS}) == reads


def test_weights_that_are_elsewhere_are_not_read(several: Artifact) -> None:
    assert WEIGHTS not in {one.kind for one in needed(several, {"weights": str(several.folder / "weights")})}


def test_loras_that_are_chosen(several: Artifact) -> None:
    """All where nobody says which, if a profile has slots; none without."""
    manifest = several.manifest
    profiles = {
        name: replace(one, options=replace(one.options, lora_rank=8))
        for name, one in manifest.profiles.items()
    }
    adapters = {"style": plain_adapter("style"), "faces": plain_adapter("faces")}
    built = several.changed(profiles=profiles, adapters=adapters)

    def read(several: Artifact, **given: Any) -> set[str]:
        return {one.of for one in needed(several, **given) if one.kind is ADAPTER}

    assert read(built) == {"style", "faces"} and read(several) == set()
    assert read(built, loras=["style"]) == {"style"} and read(built, loras=()) == set()


def test_what_does_not_fit_is_refused_as_a_load_does(several: Artifact) -> None:
    with refuses("not_built", ArtifactError, what="v9", remedy="--target v9"):
        needed(several, {"target": "v9"})
    with refuses("unknown_parameter", what="'profiles'", remedy="profile"):
        needed(several, {"profiles": ["x"]})
    with refuses("invalid_value", what="'none'", expected="auto, low"):
        needed(several, {"memory": "none"})


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
    several = open_artifact(folder)
    assert len(several.manifest.verdicts) == 2
    assert [one.of for one in needed(several) if one.kind is VERDICT] == [own]


# What the processes of a group agree on.


def agreed(toy_artifact: Path, group: Noting | None, policy: LoadPolicy) -> LoadPolicy:
    manifest = read_manifest(toy_artifact)
    (profile,) = manifest.profiles.values()
    return together(cast(ProcessGroup, group), manifest, "cpu", profile, policy, ["a fox"], None)


def test_alone_nothing_changes(toy_artifact: Path) -> None:
    policy = LoadPolicy(allow_compile=True)
    assert agreed(toy_artifact, None, policy) is policy
    agree_on_generation(None, cast(Any, None), None, None)


def test_all_load_the_same(toy_artifact: Path) -> None:
    """The user's embeddings are left out: one host may have a prompt that another has to encode."""
    group = Noting()
    assert agreed(toy_artifact, group, LoadPolicy()).embeddings == "artifact"
    artifact, request = group.facts
    assert artifact["target"] == "cpu" and artifact["content digest"].startswith("sha256:")
    assert request["prompts"] == ["a fox"] and request["transfer"] == "auto"
    assert "weights" not in request  # each host has its own folder
    assert agreed(toy_artifact, group, LoadPolicy(embeddings="none")).embeddings == "none"


@pytest.mark.parametrize("option", [{"allow_compile": True}, {"text_encoder_device": "cpu"}])
def test_nothing_is_done_that_hosts_may_do_otherwise(toy_artifact: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with refuses("conflict", what=name):
        agreed(toy_artifact, Noting(), LoadPolicy(**option))


def test_all_make_the_same_video() -> None:
    group = Noting()
    for latents in (None, np.zeros((1, 2)), np.ones((1, 2))):
        agree_on_generation(cast(ProcessGroup, group), generation(seed=3), None, latents)
    assert [facts["seed"] for facts in group.facts] == [3] * 3
    assert group.facts[0].items() >= {"profile": BUILT.name, **options(seed=3)}.items()
    assert group.facts[0]["latents"] is None
    assert group.facts[1]["latents"] != group.facts[2]["latents"]
