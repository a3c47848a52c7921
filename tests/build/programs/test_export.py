"""Program sets: what targets share, what they do not, and what is no longer valid when programs change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import msgspec
import pytest

from helpers.manifests import ENVIRONMENT, plain_manifest, plain_program, plain_target
from wanbuild.build_options import BuildOptions
from wanbuild.programs import export
from wanbuild.programs.export import profile_of, used_sets, with_programs
from wanbuild.programs.shape import Shape
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, Recorded
from wanrun.artifact.parameters import DtypePolicy
from wanrun.artifact.programs import Kernels, Profile, Program
from wanrun.artifact.targets import Executable

SMALL, LARGE = Shape(96, 64, 9, 1, True), Shape(192, 128, 17, 1, True)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The profiles that are exported, by a stand-in: its program depends on what the real ones depend on."""
    names: list[str] = []

    def builder(manifest: Manifest, profile: Profile, target: TargetSpec) -> str:
        return f"{profile.options} {target.kernels} {jax.__version__}"

    def export_profile(artifact: Artifact, name: str, facts: str, platform: str) -> dict[str, Program]:
        names.append(name)
        return {"prepare": plain_program(file=f"programs/{name}", sha256=facts)}

    monkeypatch.setattr(export, "builder_of", builder)
    monkeypatch.setattr(export, "_export_profile", export_profile)
    return names


def target_spec(name: str, image_multiple: int = 1) -> TargetSpec:
    kernels = Kernels("cpu", "winograd", weight_bits=True, image_multiple=image_multiple)
    return TargetSpec(name, "cpu", kernels, cast(Any, None), 0, ENVIRONMENT)


def build(manifest: Manifest, spec: TargetSpec, shapes: Sequence[Shape], **options: Any) -> Manifest:
    """What ``wanbuild compile`` makes of a manifest, with an executable for every program."""
    wanted = [profile_of(manifest, shape, BuildOptions(**options)) for shape in shapes]
    artifact, key = with_programs(Artifact(manifest, Path("artifact")), spec, wanted)
    changed = artifact.manifest
    built = manifest.targets.get(spec.name)
    names = {*(built.executables if built else ()), *(profile.name for profile in wanted)}
    target = plain_target(
        spec.environment,
        program_set=key,
        folder=f"executables/{spec.name}",
        executables={name: {"prepare": Executable("entry", 1, "0")} for name in names},
        statistics={},
    )
    targets = {**changed.targets, spec.name: target}
    return changed.changed(targets=targets, program_sets=used_sets(changed.program_sets, targets))


@pytest.fixture
def converted() -> Manifest:
    policy = DtypePolicy("bfloat16", "float32")
    return plain_manifest(dtypes=dict.fromkeys(("transformer", "text_encoder", "vae"), policy))


def names_of(manifest: Manifest, target: str) -> set[str]:
    """The profiles that a target has programs and executables of."""
    found = manifest.targets[target]
    assert set(found.executables) <= set(manifest.program_sets[found.program_set].programs)
    return set(found.executables)


def test_a_set_is_named_by_what_changes_its_programs(converted: Manifest, exported: list[str]) -> None:
    manifest = build(converted, target_spec("cpu"), [SMALL])
    ((key, one),) = manifest.program_sets.items()
    assert key.startswith("cpu-") and len(key) == 12 and key == one.key and one.jax == jax.__version__
    assert (one.mesh, list(one.programs)) == ({}, ["96x64x9-b1-cfg"])
    others = [
        msgspec.structs.replace(one, platform="tpu"),
        msgspec.structs.replace(one, mesh={"data": 2}),
        msgspec.structs.replace(one, jax="0.0.1"),
        *(
            msgspec.structs.replace(one, kernels=msgspec.structs.replace(one.kernels, **change))
            for change in (
                {"attention": "flash"},
                {"convolution": "direct"},
                {"weight_bits": False},
                {"image_multiple": 128},
            )
        ),
    ]
    assert len({key, *(other.key for other in others)}) == len(others) + 1
    assert msgspec.structs.replace(one, programs={}).key == key


def test_targets_with_equal_kernels_share_programs(converted: Manifest, exported: list[str]) -> None:
    manifest = build(converted, target_spec("cpu"), [SMALL])
    manifest = build(manifest, target_spec("cpu-of-another-kind"), [SMALL, LARGE])
    assert len(manifest.program_sets) == 1
    assert names_of(manifest, "cpu") == {"96x64x9-b1-cfg"}  # no executable was lost, and none made up
    assert names_of(manifest, "cpu-of-another-kind") == {"96x64x9-b1-cfg", "192x128x17-b1-cfg"}


def test_targets_with_other_kernels_do_not_overwrite_each_other(
    converted: Manifest, exported: list[str]
) -> None:
    manifest = build(converted, target_spec("cpu"), [SMALL])
    both = build(manifest, target_spec("padded", 128), [SMALL])
    assert len(both.program_sets) == 2
    profile = both.profiles["96x64x9-b1-cfg"]
    programs = [both.programs(both.targets[name], profile) for name in ("cpu", "padded")]
    assert programs[0] != programs[1]
    assert programs[0] == manifest.programs(manifest.targets["cpu"], profile)


def test_other_options_leave_nothing_stale(converted: Manifest, exported: list[str]) -> None:
    """The other targets' programs and executables of the profile, and what was recorded of it, are gone."""
    manifest = build(converted, target_spec("cpu"), [SMALL, LARGE])
    manifest = build(manifest, target_spec("same"), [SMALL, LARGE])
    manifest = build(manifest, target_spec("padded", 128), [SMALL, LARGE])
    golden = {name: Recorded(file=f"golden/{name}", sha256="") for name in manifest.profiles}
    manifest = build(manifest.changed(golden=golden), target_spec("cpu"), [SMALL], max_steps=7)
    assert names_of(manifest, "cpu") == {"96x64x9-b1-cfg", "192x128x17-b1-cfg"}
    for name in ("same", "padded"):
        assert names_of(manifest, name) == {"192x128x17-b1-cfg"}
    profile = manifest.profiles["96x64x9-b1-cfg"]
    assert profile.options.max_steps == 7 and profile.index == 0
    assert not manifest.programs(manifest.targets["padded"], profile)
    assert list(manifest.golden) == ["192x128x17-b1-cfg"]
    again = build(manifest, target_spec("padded", 128), [SMALL], max_steps=7)
    assert names_of(again, "padded") == {"96x64x9-b1-cfg", "192x128x17-b1-cfg"}
    assert list(again.golden) == ["192x128x17-b1-cfg"]


def test_another_jax_exports_all_of_a_target_again(
    converted: Manifest, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build(converted, target_spec("cpu"), [LARGE], max_steps=7)
    monkeypatch.setattr(jax, "__version__", "99.0")
    exported.clear()
    newer = build(manifest, target_spec("cpu"), [SMALL])
    assert exported == ["96x64x9-b1-cfg", "192x128x17-b1-cfg"]
    assert newer.profiles["192x128x17-b1-cfg"] == manifest.profiles["192x128x17-b1-cfg"]
    ((_, only),) = newer.program_sets.items()
    assert only.jax == "99.0"


def test_options_are_what_a_profile_was_built_with(converted: Manifest) -> None:
    options = BuildOptions(dtype="float32", loop="scan", max_steps=9, vae_decode_chunk=2)
    profile = profile_of(converted, SMALL, options)
    assert (Shape.of(profile), BuildOptions.of(profile.options)) == (SMALL, options)
    assert (profile.options.weights_dtype, profile.options.image_weights_dtype) == ("bfloat16", None)
