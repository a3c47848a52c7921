"""The profile and the target of a run, and shapes that cannot be built."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from helpers.manifests import ENVIRONMENT, built_with, plain_manifest, plain_model, with_model
from helpers.media_files import task_of
from helpers.refusals import refuses
from wanrun.artifact import select
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking, Model
from wanrun.artifact.possible import check_in_chunks, check_possible
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_profile, select_target
from wanrun.artifact.target_names import TargetName, built_target, named_target
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, Mismatch, UsageError
from wanrun.machine import environment
from wanrun.machine.cpu import CPU_LEVEL_FEATURES
from wanrun.machine.environment import host_mismatches

# --- select ---


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


THREE = (LARGE, SMALL, TWO)


@pytest.mark.parametrize(
    ("built", "asked", "wanted", "options"),
    [
        (THREE, {"size": (64, 96)}, "64x96 1 on", "64x96 --frames 9 --guidance"),
        (THREE, {"size": (160, 96), "num_frames": 13}, "160x96 13 1 on", "160x96 --frames 13 --guidance"),
        (THREE, {"num_videos": 3}, "3 on", "160x96 --frames 9 --guidance --num-videos 3"),
        (
            THREE,
            {"num_videos": 2, "guidance": False},
            "2 off",
            "96x64 --frames 9 --no-guidance --num-videos 2",
        ),
        ([SMALL], {"num_references": 3}, "1 on 3", "96x64 --frames 9 --guidance --reference-images 3"),
        ([REFERENCES], {"guidance": False}, "1 off 0", "96x64 --frames 9 --no-guidance"),
    ],
)
def test_what_is_not_built_is_refused(
    built: Sequence[Profile], asked: Mapping[str, Any], wanted: str, options: str
) -> None:
    compiling = f"wanbuild compile --size {options} --artifact artifact"
    with refuses("not_built", ArtifactError, remedy=compiling) as caught:
        select_profile(Artifact(manifest_of(*built), HERE), **asked)
    assert str(caught.value.expected).endswith(", ".join(one.name for one in built))
    assert re.findall(r"\d+x\d+|\d+|on\b|off\b", caught.value.what) == wanted.split()
    assert "build" in caught.value.fields
    with refuses("not_built", ArtifactError, what="artifact", remedy="wanbuild compile"):
        select_profile(Artifact(manifest_of(), HERE), **asked)


def test_a_remedy_builds_what_was_asked_for() -> None:
    """With guidance the model's own way, or as an option, whatever the built profiles have."""
    distilled = with_model(plain_manifest(), {"guidance_scale": 1.0}).model
    both = SimpleNamespace(model=distilled, profiles={one.name: one for one in (SMALL, WITHOUT)})
    for guidance, option in ((True, " --guidance "), (False, " --no-guidance ")):
        with pytest.raises(ArtifactError) as caught:
            select_profile(Artifact(cast(Manifest, both), HERE), size=(96, 96), guidance=guidance)
        assert option in (caught.value.remedy or "")


# --- the target ---


PROFILE = profile(0, (96, 64), 9)
EMPTY: Mapping[str, int] = MappingProxyType({})


def target(
    *lacks: str,
    mesh: Mapping[str, int] = EMPTY,
    executables: bool = True,
    programs: bool = True,
    **facts: Any,
) -> SimpleNamespace:
    """A target: the facts of this machine that differ, the mesh, what is built, and facts of its own."""
    return SimpleNamespace(
        lacks=lacks,
        mesh=mesh,
        environment={"platform": "cpu", **facts},
        executables={PROFILE.name: {}} if executables else {},
        programs=programs,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an artifact of these targets, on a machine that differs as they say."""

    def make(targets: Mapping[str, SimpleNamespace]) -> Artifact:
        for name, one in targets.items():
            one.program_set = one.environment["named"] = name
            one.requirements = SimpleNamespace(file=f"requirements-{name}.txt", sha256="")

        def differing(environment: Mapping[str, str], requirements: Path, needed: int) -> list[Mismatch]:
            assert requirements == HERE / f"requirements-{environment['named']}.txt"
            return [Mismatch(fact, "a", "b", "mend it") for fact in targets[environment["named"]].lacks]

        monkeypatch.setattr(select, "host_mismatches", differing)
        sets = {
            name: SimpleNamespace(mesh=one.mesh, kernels=SimpleNamespace(w8a8="w8a8" in name))
            for name, one in targets.items()
        }
        manifest: Any = SimpleNamespace(
            targets=targets, programs=lambda target, profile: target.programs, program_sets=sets
        )
        return Artifact(manifest, HERE)

    return make


def meshes(platform: str) -> dict[str, SimpleNamespace]:
    made = {"eight": {"data": 2, "context": 4}, "four": {"context": 4}, "one": {}}
    return {name: target(mesh=mesh, platform=platform) for name, mesh in made.items()}


def levels(*lacking: str) -> dict[str, SimpleNamespace]:
    names = ("cpu-v3", "cpu-v4", "cpu-v4-bf16")
    made = {name: target(*["CPU features"] * (name in lacking), cpu_level=name) for name in names}
    return {"cpu": target(*["CPU features"] * ("cpu" in lacking)), **made}


COMPILED: dict[str, Any] = {"topology": "1x1x1"}
ONE_FITS = {"a": target("CPU"), "rtx4090": target(), "c": target("CPU", "RAM")}


@pytest.mark.parametrize(
    ("targets", "asked", "chosen"),
    [
        *((ONE_FITS, name, "rtx4090") for name in (None, "local", "rtx4090", "RTX 4090")),
        # Devices of a CPU are the same cores, so one is preferred; of accelerators, all.
        (meshes("cpu"), None, "one"),
        (meshes("tpu"), None, "eight"),
        *((meshes(platform), "four", "four") for platform in ("cpu", "tpu")),
        # Rounded activations are asked for by name, or they are all that fits.
        ({"a-w8a8": target(), "b": target()}, None, "b"),
        ({"a-w8a8": target(), "b": target()}, "a-w8a8", "a-w8a8"),
        ({"a-w8a8": target(), "b": target("CPU")}, None, "a-w8a8"),
        ({"a-w8a8": target(mesh={"context": 2}, platform="tpu"), "b": target(platform="tpu")}, None, "b"),
        # The highest level that fits.
        (levels(), None, "cpu"),
        (levels("cpu"), None, "cpu-v4-bf16"),
        (levels("cpu", "cpu-v4-bf16"), None, "cpu-v4"),
        (levels("cpu", "cpu-v4", "cpu-v4-bf16"), None, "cpu-v3"),
        # What was compiled on the chip, and what has the executables.
        ({"h200": target(**COMPILED), "here": target(), "nearby": target(**COMPILED)}, None, "here"),
        ({"a": target(executables=False), "b": target()}, None, "b"),
    ],
)
def test_the_target_that_is_preferred(
    machine: Any, targets: dict[str, SimpleNamespace], asked: str | None, chosen: str
) -> None:
    found = select_target(machine(targets), PROFILE, asked)
    assert (found.name, found.target, found.mismatches) == (chosen, targets[chosen], ())
    assert found.mesh == targets[chosen].mesh
    if asked is None:
        assert {other.partition(" ")[0] for other in found.others} == {
            name for name, one in targets.items() if one.lacks
        }


TWO_LACK = {"a": target("CPU", "RAM"), "b": target("CPU")}
CHIPS = {"cpu": target(), "v5e": target("platform"), "v6e": target("device kind", "package libtpu")}
PACKAGES = {"cpu": target("package jax", "package jaxlib"), "v5e": target("platform")}


@pytest.mark.parametrize(
    ("targets", "asked", "code", "what", "facts", "remedy"),
    [
        (TWO_LACK, None, "wrong_machine", "target b", "CPU", ""),
        (TWO_LACK, "a", "wrong_machine", "target a", "CPU RAM", ""),
        (CHIPS, "v5e", "wrong_machine", "target v5e", "platform", "None"),
        # A chip that is not there is farther than packages.
        (PACKAGES, None, "wrong_machine", "target cpu", "jax jaxlib", "v5e (platform "),
        ({"a": target(), "b": target()}, "v5e", "not_built", "v5e", "", "--target v5e"),
        ({"a": target()}, "RTX 5090", "not_built", "", "", "'RTX 5090'"),  # as a shell takes it
        (
            {"a": target(executables=False), "b": target()},
            "a",
            "not_built",
            "target a",
            "",
            "wanbuild compile",
        ),
        ({"a": target(programs=False)}, None, "not_built", PROFILE.name, "", "wanbuild compile"),
    ],
)
def test_a_target_that_cannot_be_used(
    machine: Any, targets: Any, asked: str | None, code: ErrorCode, what: str, facts: str, remedy: str
) -> None:
    with refuses(code, ArtifactError, what=what, remedy=remedy) as caught:
        select_target(machine(targets), PROFILE, asked)
    assert re.findall(r"(\w+): ", caught.value.what) == (["machine", *facts.split()] if facts else [])
    if code == "not_built" and asked not in (None, *targets):
        assert str(caught.value.expected).endswith(", ".join(targets))


def test_the_nearest_may_be_compiled_for(machine: Any) -> None:
    found = select_target(machine(TWO_LACK), PROFILE, allow_compile=True)
    assert (found.name, [fact.what for fact in found.mismatches]) == ("b", ["CPU"])
    for targets, asked, chosen in (
        ({"a": target(executables=False), "b": target()}, "a", "a"),
        ({"a": target(programs=False), "b": target("CPU")}, None, "b"),
    ):
        assert select_target(machine(targets), PROFILE, asked, allow_compile=True).name == chosen


def test_others_are_told_with_a_reason_each(machine: Any) -> None:
    found = select_target(machine(CHIPS), PROFILE)
    v5e, v6e = found.others
    assert found.name == "cpu" and v5e.startswith("v5e (platform ") and v6e.startswith("v6e (device kind ")
    assert select_target(machine(CHIPS), PROFILE, "cpu").others == ()


def test_a_host_below_all_levels_is_told_what_it_lacks(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = machine({"cpu-v3": target(), "cpu-v4": target()})
    for name, one in artifact.manifest.targets.items():
        one.environment = ENVIRONMENT | {"cpu_level": name, "cpu_features": list(CPU_LEVEL_FEATURES[name])}
        one.requirements.file = "requirements.txt"
    monkeypatch.setattr(environment, "cpu_features", lambda: ("sse4_1", "sse4_2"))
    monkeypatch.setattr(environment.platform, "machine", lambda: ENVIRONMENT["machine"])
    monkeypatch.setattr(environment, "package_versions", lambda name: ENVIRONMENT["packages"])
    monkeypatch.setattr(select, "host_mismatches", host_mismatches)
    with refuses("wrong_machine", ArtifactError, what="abm avx avx2 ", remedy="cpu-v4") as caught:
        select_target(artifact, PROFILE)
    assert "cpu-v3" in caught.value.what and "avx512" not in caught.value.what


def test_a_reason_is_the_system_s(tmp_path: Path) -> None:
    """On this host without an accelerator, whatever packages are installed."""
    built = {**ENVIRONMENT, "platform": "tpu", "device_kind": "TPU v5 lite", "machine": "another"}
    (found,) = host_mismatches(built, HERE, root=tmp_path)
    assert (found.what, found.expected, found.found) == ("platform", "tpu", "no TPU")


# --- target names ---


MESHES = {
    "rtx4090": {},
    "rtx4090-w8a8": {},
    "rtx4090-context2": {"context": 2},
    "rtx4060ti-16gb-local": {},
    "v7x-w8a8-data2-context4": {"data": 2, "context": 4},
    "h100-context4": {"context": 4},
    "h100-data2-context4": {"data": 2, "context": 4},
    "cpu-v4": {},
}
"""Targets of an artifact, with their meshes."""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in MESHES),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),  # of several meshes, one device
        ("4090-w8a8", "rtx4090-w8a8"),
        ("4090-2", "rtx4090-context2"),
        ("4060 Ti 16GB local", "rtx4060ti-16gb-local"),
        ("v7x-w8a8", "v7x-w8a8-data2-context4"),  # the only mesh
        ("V7X-8-w8a8", "v7x-w8a8-data2-context4"),
        ("h100-8", "h100-data2-context4"),
        ("h100", None),  # two meshes
        ("v7x", None),
        ("4090-w8a8-2", None),
        ("4070", None),
        ("4060ti", None),  # another kind of target
        ("local", None),
        ("", None),
    ],
)
def test_the_target_that_is_meant(text: str, name: str | None) -> None:
    assert built_target(text, MESHES) == name


def test_a_name_is_read_back() -> None:
    for name in (TargetName("v7x"), TargetName("v7x", w8a8=True), TargetName("v7x", w8a8=True, count=8)):
        assert named_target(name.text, ["v7x"]) == name


# --- possible ---


MODEL, FIRST, BOTH, SEGMENTS = (
    plain_model(size_multiple=16, vae_temporal=4, task=task_of(variant, encoder=False))
    for variant in ("wan2.1-t2v", "wan2.1-i2v", "wan2.2-i2v", "wan2.2-animate")
)


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((60, 30), ["64x32", "48x32"]),
        ((832, 470), ["832x464", "832x480"]),
        ((100, 100), ["96x96", "96x112"]),
        ((3, 2), ["16x16"]),
        ((40, 24), ["32x16", "32x32"]),
    ],
)
def test_the_nearest_sizes(size: tuple[int, int], nearest: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        check_possible(MODEL, size, None)
    assert raised.value.fields == ("size",)
    named = re.findall(r"[0-9]+x[0-9]+", raised.value.remedy or "")
    assert named == nearest
    for one in named:
        width, height = map(int, one.split("x"))
        check_possible(MODEL, (width, height), None)


@pytest.mark.parametrize(
    ("frames", "model", "nearest"),
    [
        (80, MODEL, [77, 81]),
        (0, MODEL, [1]),
        (-7, FIRST, [1]),
        (2, FIRST, [1, 5]),
        (3, SEGMENTS, [5]),
        (1, SEGMENTS, [5]),
        (6, SEGMENTS, [5, 9]),
        (1, BOTH, [5]),
        (2, BOTH, [5]),
    ],
)
def test_the_nearest_frames(frames: int, model: Model, nearest: list[int]) -> None:
    with pytest.raises(UsageError) as raised:
        check_possible(model, None, frames)
    assert raised.value.fields == ("num_frames",)
    named = list(map(int, re.findall("[0-9]+", raised.value.remedy or "")))
    assert named == nearest
    for one in named:
        check_possible(model, None, one)


def test_what_no_profile_of_chunks_has() -> None:
    live, alone = (plain_model(chunks=Chunking(first=3, each=3, alone=alone)) for alone in (False, True))
    check_in_chunks(plain_model(), 2, True)
    check_in_chunks(live, 1, False)
    check_in_chunks(alone, 1, True)
    for model, videos, guidance, name in (
        (live, 1, True, "guidance_scale"),
        (live, 2, False, "num_videos"),
        (alone, 2, True, "num_videos"),
    ):
        with pytest.raises(UsageError) as raised:
            check_in_chunks(model, videos, guidance)
        assert raised.value.fields == (name,)
