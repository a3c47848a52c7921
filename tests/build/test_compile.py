"""What compile adds to an artifact, and that golden/ is recorded and replayed."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import PROGRAMS
from wanbuild import verify
from wanbuild.compile import CompileRequest, compile_artifact
from wanbuild.programs import BuildOptions
from wanrun.errors import VerificationError
from wanrun.manifest import Manifest, read_manifest

PROFILE = "96x64x9-b1-cfg"
REPOSITORY = Path(__file__).parents[2]


def compile_again(artifact: Path, **changes: Any) -> tuple[Manifest, list[str]]:
    """Compiles the toy artifact's own profile again; returns the manifest and what was reported."""
    lines: list[str] = []
    request = CompileRequest(
        artifact, ["cpu"], [(96, 64)], [9], [True], options=BuildOptions(dtype="float32")
    )
    return compile_artifact(dataclasses.replace(request, **changes), lines.append), lines


def listed_files(artifact: Path, manifest: Manifest) -> set[Path]:
    programs = {
        artifact / program.file
        for profile in manifest.profiles.values()
        for by_name in profile.programs.values()
        for program in by_name.values()
    }
    return programs | {
        artifact / target.folder / entry.file
        for target in manifest.targets.values()
        for by_name in target.executables.values()
        for entry in by_name.values()
    }


def files_below(artifact: Path) -> set[Path]:
    folders = (artifact / "programs", artifact / "executables")
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_a_profile_that_is_there_is_kept(artifact_copy: Path) -> None:
    before = read_manifest(artifact_copy)
    stray = artifact_copy / "executables" / "cpu" / "jit_stray-0-cache"
    stray.write_bytes(b"left by a killed build")
    after, lines = compile_again(artifact_copy)
    assert len(lines) == len(PROGRAMS) and all("up to date" in line for line in lines)
    assert after.content_digest == before.content_digest
    assert after.targets["cpu"].executables == before.targets["cpu"].executables
    assert files_below(artifact_copy) == listed_files(artifact_copy, after)


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
    programs = read_manifest(toy_artifact).profiles[PROFILE].programs["cpu"]
    assert set(programs) == set(PROGRAMS)
    assert programs["encode_text_64"].avals["outputs"]["embeddings"] == "float32[1,64,32]"
    step = programs["denoise_step"]
    assert [step.inputs[index] for index in step.donate] == ["latents", "history"]
    assert step.avals["inputs"]["guidance_scale"] == "float32[]"
    assert step.avals["inputs"]["latents"] == "float32[1,16,3,8,12]"
    assert programs["decode_video"].avals["outputs"]["frames"] == "uint8[9,64,96,3]"


def test_golden(artifact_copy: Path) -> None:
    """Recorded, replayed with equal digests, and a change of what is computed is noticed."""
    lines: list[str] = []
    verify.record(artifact_copy, lines.append)
    manifest = read_manifest(artifact_copy)
    file = artifact_copy / manifest.golden[PROFILE]["file"]
    assert verify.replay(artifact_copy, lines.append) == {PROFILE: "digests equal"}

    golden = verify.Golden.from_json(json.loads(file.read_text()))
    other = dataclasses.replace(golden, latents_sha256="0" * 64)
    with pytest.raises(VerificationError, match="latents_sha256 differs"):
        verify.compare(golden, other)

    elsewhere = dataclasses.replace(golden, machine={**golden.machine, "machine": "elsewhere"})
    noise = np.random.default_rng(0).standard_normal(len(golden.samples))
    near = dataclasses.replace(elsewhere, samples=tuple(np.asarray(golden.samples) * (1 + 1e-6 * noise)))
    assert "another kind of machine" in verify.compare(golden, near)
    far = dataclasses.replace(elsewhere, samples=tuple(np.asarray(golden.samples) * (1 + 1e-2 * noise)))
    with pytest.raises(VerificationError, match=r"at most 0\.0001"):
        verify.compare(golden, far)
    nan = dataclasses.replace(elsewhere, samples=tuple(np.asarray(golden.samples) * np.nan))
    with pytest.raises(VerificationError):
        verify.compare(golden, nan)


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
    assert not list((artifact_copy / "executables").glob(".building-*"))


def test_record_through_a_link(artifact_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the artifact's, whatever it is called."""
    monkeypatch.chdir(artifact_copy)
    verify.record(Path(), print)
    assert read_manifest(artifact_copy).golden
