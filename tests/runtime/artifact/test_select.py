"""The profile and the target of a run: what was asked for, or one line that says what there is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.manifests import ENVIRONMENT, built_with, plain_manifest, plain_model, with_model
from helpers.refusals import refuses
from wanrun.artifact import select
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_profile, select_target
from wanrun.errors import ArtifactError, Mismatch
from wanrun.machine import environment
from wanrun.machine.cpu import CPU_LEVEL_FEATURES
from wanrun.machine.environment import host_mismatches

HERE = Path("artifact")


def profile(
    index: int,
    size: tuple[int, int],
    frames: int,
    videos: int = 1,
    guidance: bool = True,
    references: int = 0,
) -> Profile:
    return Profile(*size, frames, videos, guidance, index, built_with(), references)


SMALL, LARGE, LONG = profile(2, (96, 64), 9), profile(0, (160, 96), 9), profile(1, (96, 64), 13)
WITHOUT, TWO = profile(3, (96, 64), 9, guidance=False), profile(4, (96, 64), 9, videos=2)
REFERENCES = profile(5, (96, 64), 9, references=2)


def manifest_of(*profiles: Profile) -> Manifest:
    return cast(
        Manifest,
        SimpleNamespace(model=plain_model(), profiles={profile.name: profile for profile in profiles}),
    )


ALL = manifest_of(SMALL, LARGE, LONG, WITHOUT, TWO, REFERENCES)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, LARGE),  # the first built, whatever the order of names
        ({"size": (96, 64)}, LONG),
        ({"size": (96, 64), "num_frames": 9}, SMALL),
        ({"num_frames": 13}, LONG),
        ({"guidance": False}, WITHOUT),
        ({"num_videos": 2}, TWO),
        ({"num_references": 2}, REFERENCES),
    ],
)
def test_the_profile_that_was_asked_for(asked: Mapping[str, Any], chosen: Profile) -> None:
    assert select_profile(Artifact(ALL, HERE), **asked) is chosen


@pytest.mark.parametrize(
    ("asked", "wanted", "options"),
    [
        ({"size": (64, 96)}, ["64x96", "1", "on"], "--size 64x96 --frames 9 --guidance"),
        (
            {"size": (160, 96), "num_frames": 13},
            ["160x96", "13", "1", "on"],
            "--size 160x96 --frames 13 --guidance",
        ),
        ({"num_videos": 3}, ["3", "on"], "--size 160x96 --frames 9 --guidance --num-videos 3"),
        (
            {"num_videos": 2, "guidance": False},
            ["2", "off"],
            "--size 96x64 --frames 9 --no-guidance --num-videos 2",
        ),
    ],
)
def test_what_is_not_built_is_refused(asked: Mapping[str, Any], wanted: list[str], options: str) -> None:
    built = ", ".join(one.name for one in (LARGE, SMALL, TWO))
    compiling = f"wanbuild compile {options} --artifact artifact"
    with refuses("not_built", ArtifactError, expected=built, remedy=compiling) as caught:
        select_profile(Artifact(manifest_of(SMALL, LARGE, TWO), HERE), **asked)
    assert re.findall(r"\d+x\d+|\d+|on\b|off\b", caught.value.what) == wanted
    assert "build" in caught.value.fields


def test_a_remedy_builds_what_was_asked_for() -> None:
    """With guidance the model's own way, or as an option, whatever the built profiles have."""
    distilled = with_model(plain_manifest(), {"guidance_scale": 1.0}).model
    both = SimpleNamespace(model=distilled, profiles={one.name: one for one in (SMALL, WITHOUT)})
    for guidance, option in ((True, " --guidance "), (False, " --no-guidance ")):
        with pytest.raises(ArtifactError) as caught:
            select_profile(Artifact(cast(Manifest, both), HERE), size=(96, 96), guidance=guidance)
        assert option in (caught.value.remedy or "")


def test_references_are_named_where_there_are_any() -> None:
    with refuses("not_built", ArtifactError, what="3 reference", remedy=" --reference-images 3"):
        select_profile(Artifact(manifest_of(SMALL), HERE), num_references=3)
    with refuses("not_built", ArtifactError, what="0 reference", remedy=" --no-guidance "):
        select_profile(Artifact(manifest_of(REFERENCES), HERE), guidance=False)


def test_nothing_is_built() -> None:
    with refuses("not_built", ArtifactError, what="artifact", remedy="wanbuild compile"):
        select_profile(Artifact(manifest_of(), HERE))


# -- the target


PROFILE = profile(0, (96, 64), 9)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a manifest of targets by name, each with the facts of this machine that differ."""

    def make(**mismatches: Sequence[str]) -> Any:
        targets = {
            name: SimpleNamespace(
                program_set=name,
                environment={"named": name, "platform": "cpu"},
                requirements=SimpleNamespace(file=f"requirements-{name}.txt", sha256=""),
                executables={PROFILE.name: {}},
                programs=True,
            )
            for name in mismatches
        }

        def differing(environment: Mapping[str, str], requirements: Path, needed: int) -> list[Mismatch]:
            assert requirements == HERE / f"requirements-{environment['named']}.txt"
            return [Mismatch(fact, "a", "b", "mend it") for fact in mismatches[environment["named"]]]

        monkeypatch.setattr(select, "host_mismatches", differing)
        return SimpleNamespace(
            targets=targets,
            programs=lambda target, profile: target.programs,
            program_sets={
                name: SimpleNamespace(mesh={}, kernels=SimpleNamespace(w8a8="w8a8" in name))
                for name in mismatches
            },
        )

    return make


@pytest.mark.parametrize(("platform", "preferred"), [("cpu", "one"), ("tpu", "eight")])
def test_devices_of_a_cpu_are_the_same_cores(machine: Any, platform: str, preferred: str) -> None:
    """So one is preferred there; of accelerators, all that a target was built for."""
    manifest = machine(eight=[], four=[], one=[])
    for name, mesh in (("eight", {"data": 2, "context": 4}), ("four", {"context": 4}), ("one", {})):
        manifest.program_sets[name].mesh = mesh
        manifest.targets[name].environment["platform"] = platform
    found = select_target(Artifact(manifest, HERE), PROFILE)
    assert found.name == preferred and found.mesh == manifest.program_sets[preferred].mesh
    assert select_target(Artifact(manifest, HERE), PROFILE, "four").mesh == {"context": 4}


def test_rounded_activations_are_asked_for_by_name(machine: Any) -> None:
    """Or they are all that fits."""
    assert select_target(Artifact(machine(**{"a-w8a8": [], "b": []}), HERE), PROFILE).name == "b"
    assert (
        select_target(Artifact(machine(**{"a-w8a8": [], "b": []}), HERE), PROFILE, "a-w8a8").name == "a-w8a8"
    )
    assert select_target(Artifact(machine(**{"a-w8a8": [], "b": ["CPU"]}), HERE), PROFILE).name == "a-w8a8"
    several = machine(**{"a-w8a8": [], "b": []})
    for name, mesh in (("a-w8a8", {"context": 2}), ("b", {})):
        several.program_sets[name].mesh = mesh
        several.targets[name].environment["platform"] = "tpu"
    assert select_target(Artifact(several, HERE), PROFILE).name == "b"


@pytest.mark.parametrize(
    ("lacks", "chosen"),
    [
        ((), "cpu"),
        (("cpu",), "cpu-v4-bf16"),
        (("cpu", "cpu-v4-bf16"), "cpu-v4"),
        (("cpu", "cpu-v4", "cpu-v4-bf16"), "cpu-v3"),
    ],
)
def test_the_highest_level_that_fits(machine: Any, lacks: Sequence[str], chosen: str) -> None:
    names = ("cpu", "cpu-v3", "cpu-v4", "cpu-v4-bf16")
    manifest = machine(**{name: ["CPU features"] if name in lacks else [] for name in names})
    for name in names[1:]:
        manifest.targets[name].environment["cpu_level"] = name
    found = select_target(Artifact(manifest, HERE), PROFILE)
    assert found.name == chosen
    assert [other.partition(" ")[0] for other in found.others] == list(lacks)


def test_a_host_below_all_levels_is_told_what_it_lacks(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = machine(**{"cpu-v3": [], "cpu-v4": []})
    for name, target in manifest.targets.items():
        target.environment = ENVIRONMENT | {"cpu_level": name, "cpu_features": list(CPU_LEVEL_FEATURES[name])}
        target.requirements.file = "requirements.txt"
    monkeypatch.setattr(environment, "cpu_features", lambda: ("sse4_1", "sse4_2"))
    monkeypatch.setattr(environment.platform, "machine", lambda: ENVIRONMENT["machine"])
    monkeypatch.setattr(environment, "package_versions", lambda name: ENVIRONMENT["packages"])
    monkeypatch.setattr(select, "host_mismatches", host_mismatches)
    with refuses("wrong_machine", ArtifactError, what="abm avx avx2 ", remedy="cpu-v4") as caught:
        select_target(Artifact(manifest, HERE), PROFILE)
    assert "cpu-v3" in caught.value.what and "avx512" not in caught.value.what


def test_the_target_that_fits(machine: Any) -> None:
    manifest = machine(a=["CPU"], b=[], c=["CPU", "RAM"])
    for name in (None, "local", "b"):
        found = select_target(Artifact(manifest, HERE), PROFILE, name)
        assert (found.name, found.mismatches) == ("b", ())
        assert found.target is manifest.targets["b"]


def test_the_nearest_is_told_and_may_be_used(machine: Any) -> None:
    manifest = machine(a=["CPU", "RAM"], b=["CPU"])
    with refuses("wrong_machine", ArtifactError, what="target b") as caught:
        select_target(Artifact(manifest, HERE), PROFILE)
    assert "CPU: " in caught.value.what and "RAM: " not in caught.value.what
    found = select_target(Artifact(manifest, HERE), PROFILE, allow_compile=True)
    assert (found.name, [fact.what for fact in found.mismatches]) == ("b", ["CPU"])
    with refuses("wrong_machine", ArtifactError, what="target a") as caught:
        select_target(Artifact(manifest, HERE), PROFILE, "a")
    assert "CPU: " in caught.value.what and "RAM: " in caught.value.what


def test_a_target_that_is_not_built(machine: Any) -> None:
    with refuses("not_built", ArtifactError, what="v5e", expected="a, b", remedy="--target v5e"):
        select_target(Artifact(machine(a=[], b=[]), HERE), PROFILE, "v5e")
    with refuses("not_built", ArtifactError, remedy="'RTX 5090'"):  # as a shell takes it
        select_target(Artifact(machine(a=[]), HERE), PROFILE, "RTX 5090")


def test_a_target_s_short_name(machine: Any) -> None:
    manifest = machine(rtx4090=[], cpu=[])
    assert select_target(Artifact(manifest, HERE), PROFILE, "RTX 4090").name == "rtx4090"


def test_a_target_that_has_the_executables_is_preferred(machine: Any) -> None:
    manifest = machine(a=[], b=[])
    manifest.targets["a"].executables = {}
    assert select_target(Artifact(manifest, HERE), PROFILE).name == "b"
    with refuses("not_built", ArtifactError, what="target a", remedy="wanbuild compile"):
        select_target(Artifact(manifest, HERE), PROFILE, "a")
    assert select_target(Artifact(manifest, HERE), PROFILE, "a", allow_compile=True).name == "a"


def test_a_target_without_the_profile_s_programs_is_none(machine: Any) -> None:
    manifest = machine(a=[], b=["CPU"])
    manifest.targets["a"].programs = False
    assert select_target(Artifact(manifest, HERE), PROFILE, allow_compile=True).name == "b"
    manifest.targets["b"].programs = False
    with refuses("not_built", ArtifactError, what=PROFILE.name, remedy="wanbuild compile"):
        select_target(Artifact(manifest, HERE), PROFILE)


def test_others_are_told_with_a_reason_each(machine: Any) -> None:
    manifest = machine(cpu=[], v5e=["platform"], v6e=["device kind", "package libtpu"])
    found = select_target(Artifact(manifest, HERE), PROFILE)
    v5e, v6e = found.others
    assert found.name == "cpu" and v5e.startswith("v5e (platform ") and v6e.startswith("v6e (device kind ")
    assert select_target(Artifact(manifest, HERE), PROFILE, "cpu").others == ()
    with refuses("wrong_machine", ArtifactError, what="target v5e") as caught:
        select_target(Artifact(manifest, HERE), PROFILE, "v5e")
    assert "platform: " in caught.value.what and caught.value.remedy is None


def test_a_chip_that_is_not_there_is_farther_than_packages(machine: Any) -> None:
    manifest = machine(cpu=["package jax", "package jaxlib"], v5e=["platform"])
    with refuses("wrong_machine", ArtifactError, what="target cpu", remedy="v5e (platform ") as caught:
        select_target(Artifact(manifest, HERE), PROFILE)
    assert "package jax: " in caught.value.what and "package jaxlib: " in caught.value.what


def test_what_was_compiled_on_the_chip_is_preferred(machine: Any) -> None:
    manifest = machine(h200=[], here=[], nearby=[])
    for name in ("h200", "nearby"):
        manifest.targets[name].environment["topology"] = "1x1x1"
    assert select_target(Artifact(manifest, HERE), PROFILE).name == "here"


def test_a_reason_is_the_system_s(tmp_path: Path) -> None:
    """On this host without an accelerator, whatever packages are installed."""
    built = {**ENVIRONMENT, "platform": "tpu", "device_kind": "TPU v5 lite", "machine": "another"}
    (found,) = host_mismatches(built, HERE, root=tmp_path)
    assert (found.what, found.expected, found.found) == ("platform", "tpu", "no TPU")
