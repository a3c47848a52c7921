"""What compile adds to an artifact, and that golden/ is recorded and replayed."""

from __future__ import annotations

import errno
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import PROGRAMS
from helpers.generations import toy_manifest
from helpers.manifests import plain_manifest, plain_model, programs_of, with_model
from helpers.media_files import task_of
from helpers.options import PROFILE as PLAIN
from helpers.refusals import refuses
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check import verify
from wanbuild.check.findings import Findings
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs import compile
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.staging import unlisted
from wanbuild.targets.target import resolve_target
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import UsageError
from wanrun.replay.samples import sample_media

PROFILE = "96x64x9-b1-cfg"
REPOSITORY = Path(__file__).parents[3]


def compile_again(artifact: Path, **changes: Any) -> tuple[Manifest, list[str]]:
    """Compiles the toy artifact's own profile again; returns the manifest and what was reported."""
    lines: list[str] = []
    request = CompileRequest(
        artifact, ["cpu"], [(96, 64)], [9], [True], options=BuildOptions(dtype="float32")
    )
    return compile_artifact(msgspec.structs.replace(request, **changes), lines.append), lines


def test_a_compilation_of_hours_is_announced(toy_artifact: Path) -> None:
    """As far as the programs were compiled before, and are not there."""
    manifest, lines = read_manifest(toy_artifact), list[str]()
    (target,) = manifest.targets.values()
    statistics = {PROFILE: {name: {"compile_seconds": 3600} for name in target.statistics[PROFILE]}}
    slow = manifest.changed(targets={"cpu": msgspec.structs.replace(target, statistics=statistics)})
    for known in (("prepare",), ()):
        compiler: Any = types.SimpleNamespace(usable=lambda name, program, known=known: name in known or None)
        compile._announce([programs_of(manifest, PROFILE)], compiler, slow, lines.append)
    count = len(target.statistics[PROFILE])
    assert f"{count - 1:.1f} h" in lines[0] and f"{count:.1f} h" in lines[1]
    compile._announce([programs_of(manifest, PROFILE)], compiler, manifest, lines.append)
    assert len(lines) == 2


@pytest.mark.thorough
def test_a_profile_that_is_there_is_kept(artifact_copy: Path) -> None:
    before = read_manifest(artifact_copy)
    stray = artifact_copy / "executables" / "cpu" / "jit_stray-0-cache"
    stray.write_bytes(b"left by a killed build")
    after, lines = compile_again(artifact_copy)
    assert len(lines) == len(PROGRAMS) and all("up to date" in line for line in lines)
    assert after.content_digest == before.content_digest
    assert after.targets["cpu"].executables == before.targets["cpu"].executables
    opened = open_artifact(artifact_copy)
    assert list(unlisted(opened)) == [] and opened.whole(opened.named())


def test_programs_hold_no_paths(toy_artifact: Path) -> None:
    """The same program has the same digest wherever the toolchain is installed."""
    files = list((toy_artifact / "programs").rglob("*.stablehlo"))
    assert len(files) == len(PROGRAMS)
    for file in files:
        data = file.read_bytes()
        assert b".py" not in data and str(REPOSITORY).encode() not in data and b"site-packages" not in data
    manifest = (toy_artifact / "manifest.json").read_text()
    assert str(toy_artifact) not in manifest and str(REPOSITORY) not in manifest


def test_the_manifest_says_what_a_program_takes(toy_artifact: Path) -> None:
    programs = programs_of(read_manifest(toy_artifact), PROFILE)
    assert set(programs) == set(PROGRAMS)
    assert programs["encode_text_64"].avals["outputs"]["embeddings"] == "float32[1,64,32]"
    step = programs["denoise_step"]
    assert [step.inputs[index] for index in step.donate] == ["latents", "history"]
    assert step.avals["inputs"]["guidance_scale"] == "float32[]"
    assert step.avals["inputs"]["latents"] == "float32[1,16,3,8,12]"
    assert programs["decode_video"].avals["outputs"]["frames"] == "uint8[4,64,96,3]"


def builder(manifest: Manifest, frames: int, size: tuple[int, int] = (96, 64)) -> ProgramBuilder:
    shape = Shape(*size, frames, 1, guidance=True)
    return ProgramBuilder(manifest, shape, BuildOptions(loop="step"), resolve_target("cpu").kernels)


@pytest.mark.slow
def test_what_a_step_takes_of_an_image() -> None:
    """Of text alone no frame is held, and nothing is encoded."""
    programs = {spec.name: spec for spec in builder(toy_manifest("wan2.2-ti2v"), 5).programs()}
    assert {"condition", "frame_mask"} <= set(programs["denoise_step"].inputs)
    assert "encode_video" in programs
    programs = {spec.name: spec for spec in builder(toy_manifest("wan2.1-t2v"), 5).programs()}
    assert "encode_video" not in programs
    step = programs["denoise_step"]
    assert not {"condition", "frame_mask"} & set(step.inputs)
    assert export_program(step, "cpu")


def test_a_channel_that_no_conditioner_fills(toy_artifact: Path) -> None:
    """As of a variant whose conditioner was forgotten: one line, before anything is exported."""
    manifest = read_manifest(toy_artifact)
    transformer = {**manifest.configs["transformer"], "in_channels": 17}
    changed = manifest.changed(configs={**manifest.configs, "transformer": transformer})
    with refuses("mismatch", what="input channels", expected="16 channels", found=0):
        builder(changed, 5).programs()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "frames", "message"),
    [
        ("wan2.2-animate", 1, r"num_frames 1 .* 4n \+ 1, and at least 5: a segment .*; use 5"),
        ("wan2.1-flf2v", 1, "at least 5: image and last_image may be given; use 5"),
        ("wan2.2-animate", 0, r"expected 4n \+ 1, and at least 5: .*; use 5"),
        ("wan2.1-i2v", 1, None),
        ("wan2.2-animate", 5, None),
    ],
)
def test_few_frames(tmp_path: Path, variant: str, frames: int, message: str | None) -> None:
    manifest = toy_manifest(variant)
    if message is None:
        assert builder(manifest, frames).latent_shape[1:] == (8, 12)
        return
    with pytest.raises(UsageError, match=message):
        builder(manifest, frames)
    manifest.write(tmp_path)
    with pytest.raises(UsageError, match=message):
        compile_artifact(CompileRequest(tmp_path, ["cpu"], [(96, 64)], [9, frames]), print)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.thorough
def test_tiles_change_no_program_s_inputs_and_outputs() -> None:
    """But for the history, as tiles are decoded at once; sides that are no multiple of 32 are refused."""
    manifest = published_manifest(published_names()["wan2.2-animate-14b"])
    shape, kernels = Shape(96, 64, 5, 1, guidance=True), resolve_target("cpu").kernels
    for name, history in (("encode_video", False), ("decode_video", True)):
        whole, tiled = (
            ProgramBuilder(manifest, shape, BuildOptions(vae_tile=side), kernels).named(name)
            for side in (0, 32)
        )
        assert ((tiled.arguments, tiled.outputs) != (whole.arguments, whole.outputs)) == history
        assert set(tiled.outputs) <= set(whole.outputs)
    with pytest.raises(UsageError, match="vae_tile"):
        ProgramBuilder(manifest, shape, BuildOptions(vae_tile=48), kernels)


@pytest.mark.parametrize("frames", [1, 5])
def test_samples_of_few_frames(frames: int) -> None:
    """Two fewer than a segment has, so that it is filled up, and one at least."""
    facts = {"variant": "wan2.2-animate", "task": task_of("wan2.2-animate", encoder=False)}
    manifest = plain_manifest(model=plain_model(**facts))
    profile = msgspec.structs.replace(PLAIN, num_frames=frames)
    media = sample_media(manifest, profile, mode="replace")
    assert media is not None
    for video in (media.pose_video, media.mask_video):
        assert isinstance(video, list) and len(video) == max(1, frames - 2)


@pytest.mark.parametrize(
    ("option", "least"),
    [("vae_decode_chunk", 1), ("vae_encode_chunk", 1), ("vae_tile", 0), ("max_steps", 1), ("lora_rank", 0)],
)
def test_options_that_are_out_of_range(option: str, least: int) -> None:
    with pytest.raises(UsageError) as raised:
        BuildOptions(**{option: least - 1})  # type: ignore[arg-type]
    assert raised.value.fields == (option,) and raised.value.found == least - 1
    BuildOptions(**{option: least})  # type: ignore[arg-type]


@pytest.mark.slow
def test_golden(artifact_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded by another name of the artifact, whose lock is the same, and replayed with equal digests."""
    lines: list[str] = []
    with monkeypatch.context() as there:
        there.chdir(artifact_copy)
        verify.record(Path(), lines.append)
    findings = Findings()
    assert verify.replay(artifact_copy, lines.append, findings) == {PROFILE: "digests equal"}
    assert [one.passed for one in findings.comparisons] == [True, True]
    assert [frames.shape for _, frames in findings.videos] == [(9, 64, 96, 3)]


@pytest.mark.thorough
def test_an_entry_that_cannot_be_written_is_an_error(
    artifact_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX only warns, and keeps the first part of the entry."""
    from jax._src import lru_cache

    before = read_manifest(artifact_copy)

    def cut_short(self: Any, key: str, value: bytes) -> None:
        (Path(str(self.path)) / f"{key}-cache").write_bytes(value[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lru_cache.LRUCache, "put", cut_short)
    with pytest.raises(OSError, match="No space left"):
        compile_again(artifact_copy, sizes=[(32, 32)])
    assert read_manifest(artifact_copy) == before
    assert not list((artifact_copy / "executables").glob(".wan-*"))


@pytest.mark.slow
def test_golden_where_the_artifact_turns_guidance_off(artifact_copy: Path) -> None:
    """A profile with guidance is recorded with it."""
    with_model(read_manifest(artifact_copy), {"guidance_scale": 1.0}).write(artifact_copy)
    verify.record(artifact_copy, lambda line: None)
    assert verify.replay(artifact_copy, lambda line: None) == {PROFILE: "digests equal"}
