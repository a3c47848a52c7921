"""Program sets and targets: what they share, when they are exported again, and what pip needs for them."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from packaging.requirements import Requirement

from helpers.manifests import ENVIRONMENT, plain_manifest, plain_program, plain_target
from helpers.refusals import refuses
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.verify import check_files
from wanbuild.programs import export, preview
from wanbuild.programs.export import profile_of, used_sets, with_programs
from wanbuild.programs.preview import decoder_of, fitted, with_preview
from wanbuild.programs.requirements import with_requirements, write_requirements
from wanbuild.programs.shape import Shape
from wanbuild.targets.target import TargetSpec
from wanrun import load
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import Manifest, Recorded, read_manifest
from wanrun.artifact.parameters import DtypePolicy
from wanrun.artifact.programs import Kernels, Profile, Program
from wanrun.artifact.targets import Executable, Target
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.machine.environment import host_environment, host_mismatches

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


# The requirements files of an artifact.


REPOSITORY = Path(__file__).parents[3]


def target(zstandard: bool = True, **packages: str) -> Target:
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", **packages}
    return plain_target(environment={"packages": versions, "zstandard": zstandard})


def written(artifact: Path, targets: dict[str, Target]) -> dict[str, list[str]]:
    """The lines of the files by the target that names them; every digest is that of its file."""
    found: dict[str, list[str]] = {}
    made = with_requirements(targets)
    write_requirements(artifact, made)
    for name, one in made.items():
        path = artifact / one.requirements.file
        assert one.requirements.sha256 == sha256_of(path.read_bytes())
        found[name] = lines(path)
    assert {path.name for path in artifact.iterdir()} == {one.requirements.file for one in made.values()}
    return found


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def test_a_file_for_all_targets_or_one_each(tmp_path: Path) -> None:
    """As they need the same or not; a file that is there stays."""
    (tmp_path / "same").mkdir()
    (tmp_path / "each").mkdir()
    file = tmp_path / "same" / "requirements.txt"
    inodes = set[int]()
    for _ in range(2):
        found = written(file.parent, {"cpu": target(), "cpu-of-another-kind": target()})
        assert found["cpu"] == ["jax==0.10.2", "jaxlib==0.10.2", "zstandard"]
        inodes.add(file.stat().st_ino)
    assert len(inodes) == 1 and [path.name for path in file.parent.iterdir()] == [file.name]
    found = written(tmp_path / "each", {"cpu": target(zstandard=False), "tpu": target(libtpu="0.0.30")})
    names = {path.name for path in (tmp_path / "each").iterdir()}
    assert names == {"requirements-cpu.txt", "requirements-tpu.txt"}
    assert found == {
        "cpu": ["jax==0.10.2", "jaxlib==0.10.2"],
        "tpu": ["jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.30", "zstandard"],
    }


def test_odd_versions_are_what_pip_takes(tmp_path: Path) -> None:
    """A nightly, a build of one's own, a release of a release."""
    versions = {"jax": "0.12.0.dev20261101", "jaxlib": "0.12.0+cuda13.selfbuilt", "libtpu": "0.12.0.1"}
    (texts,) = written(tmp_path, {"tpu": target(**versions)}).values()
    found = {one.name: one.specifier for one in map(Requirement, texts)}
    assert all(found[name].contains(version, prereleases=True) for name, version in versions.items())


def test_an_artifact_s_are_what_is_installed_here(toy_artifact: Path) -> None:
    """So that pip finds nothing to do on the machine that built it, and wanrun no mismatch."""
    (built,) = read_manifest(toy_artifact).targets.values()
    path = toy_artifact / built.requirements.file
    found = [Requirement(line) for line in lines(path)]
    assert {one.name for one in found} >= {"jax", "jaxlib"}
    assert all(one.specifier.contains(importlib.metadata.version(one.name)) for one in found)
    packages = built.environment["packages"]
    assert packages == host_environment("cpu")["packages"] and host_mismatches(built.environment, path) == []
    # ``pip install . -r requirements.txt`` resolves: the runtime's own range has these versions.
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    ranges = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    assert all(ranges[name].contains(packages[name]) for name in packages.keys() & ranges.keys())
    assert {"jax", "zstandard"} <= ranges.keys()


@pytest.mark.thorough
def test_verify_notices_damage_and_compile_repairs_it(artifact_copy: Path) -> None:
    path, stray = artifact_copy / "requirements.txt", artifact_copy / "requirements-tpu.txt"
    whole = path.read_bytes()
    path.write_bytes(whole + b"evil\n")
    stray.write_bytes(b"of a target that is gone")
    with refuses("damaged", ArtifactError, what="requirements.txt"):
        check_files(open_artifact(artifact_copy), lambda line: None)
    options = BuildOptions(dtype="float32")
    compile_artifact(CompileRequest(artifact_copy, ["cpu"], [(96, 64)], [9], [True], options=options), print)
    assert path.read_bytes() == whole and not stray.exists()
    check_files(open_artifact(artifact_copy), lambda line: None)


# The map from latents to colours, fitted to decoders that are known.


GREY = np.array([100.0, 120.0, 140.0])


@pytest.mark.parametrize(("channels", "spatial"), [(16, 8), (48, 16)])
def test_the_fit_finds_a_linear_decoder(channels: int, spatial: int) -> None:
    """Of as many draws as it needs, of a frame of 192 pixels."""
    rows = np.random.default_rng(1).normal(0, 20, (channels, 3))
    decoded: list[np.ndarray] = []

    def decode(latents: np.ndarray) -> np.ndarray:
        assert latents.shape == (channels, 1, 192 // spatial, 192 // spatial)
        decoded.append(latents)
        noise = np.random.default_rng(len(decoded)).normal(0, 2, (*latents.shape[2:], 3))
        return np.asarray(np.moveaxis(latents[:, 0], 0, -1) @ rows + GREY + noise)

    *found, grey = np.array(fitted(decode, channels, spatial))
    np.testing.assert_allclose(found, rows, rtol=0.01, atol=0.3)
    np.testing.assert_allclose(grey, GREY, rtol=0, atol=0.3)
    assert (len(decoded) - 1) * 36 < 5 * (channels + 1) <= len(decoded) * 36


@pytest.mark.thorough
def test_the_decoder_is_that_of_videos(toy_artifact: Path) -> None:
    """What a video's first frame is in the mean; the map is the one that compile has written."""
    artifact = open_artifact(toy_artifact)
    assert with_preview(artifact, pytest.fail) is artifact
    with load(toy_artifact, embeddings="none") as pipeline:
        latents = np.random.default_rng(0).standard_normal(pipeline.latents_shape, np.float32)
        frame = pipeline.decode(latents)[0, 0]
    height, width = latents.shape[3:]
    expected = frame.reshape(height, 8, width, 8, 3).mean((1, 3))
    np.testing.assert_allclose(decoder_of(artifact)(latents[0, :, :1]), expected, rtol=0, atol=0.6)


def test_it_is_fitted_where_there_is_no_cpu(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of JAX_PLATFORMS=cuda: on the first device that JAX has."""
    own, used, devices = open_artifact(artifact), list[jax.Device](), jax.local_devices

    def local_devices(backend: str | None = None) -> list[jax.Device]:
        if backend == "cpu":
            raise RuntimeError
        return devices()[::-1]

    def fit(*_: object) -> tuple[tuple[float, ...], ...]:
        used.extend(jnp.zeros(1).devices())
        return own.manifest.preview

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(preview, "fitted", fit)
    lines = list[str]()
    assert with_preview(own.changed(preview=()), lines.append).manifest.preview == own.manifest.preview
    assert used == devices()[-1:] and len(lines) == 1
