"""An artifact whose programs run on four CPU devices, through the command lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.artifacts import OWN_PROGRAMS, compile_fast, compiled_store
from helpers.compiling import compiled_once
from helpers.devices import on_devices
from helpers.refusals import check_json
from wanbuild.build_options import BuildOptions, CompileRequest
from wanrun.artifact.manifest import read_manifest

pytestmark = pytest.mark.thorough

TARGET = "cpu-data2-context2"
WINDOWS = ("--frames", 9, "--window-frames", 5)


def run(cli: Any, artifact: Path, folder: Path, *options: object) -> tuple[np.ndarray, dict[str, Any]]:
    """Makes a video; returns the latents and the timings."""
    folder.mkdir()
    latents, timings = folder / "latents.npy", folder / "timings.json"
    outputs = ("--output", folder / "o.npy", "--save-latents", latents, "--timing-json", timings)
    cli.succeeds("wanrun", "--artifact", artifact, "--prompt", "a fox", "--steps", 2, *outputs, *options)
    return np.load(latents), json.loads(timings.read_text())


def test_a_mesh_beside_one_device(
    cli: Any, mesh_artifact: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One artifact, moved, with targets of both: each loads its own executables; videos in windows agree."""
    moved = Path(shutil.copytree(mesh_artifact, tmp_path / "moved"))
    options = BuildOptions(dtype="float32", loop="step")
    with compiled_once(compiled_store(tmp_path_factory)):
        request = CompileRequest(moved, ["cpu"], [(96, 64)], [5], options=options)
        compile_fast(request, (*OWN_PROGRAMS, "decode_first", "decode_video"))
    manifest = read_manifest(moved)
    assert set(manifest.targets) == {"cpu", TARGET}
    before = read_manifest(mesh_artifact)
    assert manifest.targets[TARGET] == before.targets[TARGET]
    alone, timings = run(cli, moved, tmp_path / "alone", *WINDOWS)
    assert timings["cache_hits"] == 5 and not timings["cache_misses"]
    together, timings = run(cli, moved, tmp_path / "together", *WINDOWS, "--target", TARGET)
    assert timings["cache_hits"] == 5 and not timings["cache_misses"]
    assert together.shape == alone.shape == (1, 16, 3, 8, 12)
    assert 0 < np.abs(together - alone).max() < 1e-5 * np.abs(alone).max()


def test_the_whole_of_it(cli: Any, mesh_artifact: Path, tmp_path: Path) -> None:
    """Recorded, verified, inspected; damage in a weight and in an executable is found."""
    artifact = Path(shutil.copytree(mesh_artifact, tmp_path / "artifact"))
    assert "recorded" in cli.succeeds("wanbuild", "verify", "--artifact", artifact, "--record")
    assert "digests equal" in cli.succeeds("wanbuild", "verify", "--artifact", artifact)
    shown = cli.succeeds("wanbuild", "inspect", "--artifact", artifact)
    assert "data=2,context=2: 4" in shown
    (chunk,) = (artifact / "weights/transformer/patch_embedding.weight").glob("c/*/*")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    outputs = ("--output", tmp_path / "o.npy", "--json-errors")
    video = ("wanrun", "--artifact", artifact, "--prompt", "a fox", *outputs)
    check_json(cli.fails(3, *video), "damaged", message="transformer/patch_embedding/weight")
    data[100] ^= 1
    chunk.write_bytes(data)
    entry = next((artifact / "executables" / TARGET).glob("jit_denoise_step-*"))
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    check_json(cli.fails(3, *video), "damaged", message=entry)


def test_the_programs_are_the_same_each_time(mesh_artifact: Path) -> None:
    """In other processes, with more devices than the mesh has."""
    programs = read_manifest(mesh_artifact).program_sets
    ((_, of_profile),) = next(iter(programs.values())).programs.items()
    found = json.loads(on_devices(8, digests, str(mesh_artifact)))
    assert found == {name: program.sha256 for name, program in of_profile.items()}


def digests(artifact: str) -> None:
    """Prints the digest of every program, exported again."""
    import jax

    from wanbuild.build_options import BuildOptions
    from wanbuild.programs.export import export_program
    from wanbuild.programs.kinds import ProgramBuilder
    from wanbuild.programs.shape import Shape
    from wanrun.files import sha256_of

    manifest = read_manifest(Path(artifact))
    (profile,), (programs,) = manifest.profiles.values(), manifest.program_sets.values()
    shape, options = Shape.of(profile), BuildOptions.of(profile.options)
    builder = ProgramBuilder(manifest, shape, options, programs.kernels, programs.mesh, jax.devices())
    print(json.dumps({spec.name: sha256_of(export_program(spec, "cpu")) for spec in builder.programs()}))


def test_impossible_meshes(cli: Any, toy_artifact: Path, tmp_path: Path) -> None:
    """One line each, and the artifact is as before."""
    artifact = Path(shutil.copytree(toy_artifact, tmp_path / "artifact"))
    before = sorted(artifact.rglob("*"))
    shape = ("--size", "96x64", "--frames", 9)
    command = ("wanbuild", "compile", "--artifact", artifact, *shape, "--json-errors")
    for mesh, error, parts in (
        (
            "context=4",
            "mismatch",
            {"message": "context", "expected": 2, "found": 4, "remedy": "--mesh data=2"},
        ),
        ("x=2", "unknown_name", {"message": "--mesh", "expected": "data, ring, fsdp", "found": "'x'"}),
        ("data=4", "mismatch", {"message": "data", "found": 4}),
    ):
        check_json(cli.fails(2, *command, "--mesh", mesh), error, **parts)
    assert sorted(artifact.rglob("*")) == before
