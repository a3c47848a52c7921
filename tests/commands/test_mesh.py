"""An artifact whose programs run on four CPU devices: of one process, and of several that make one video."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.artifacts import OWN_PROGRAMS, compile_fast, compiled_store
from helpers.compiling import compiled_once
from helpers.damage import one_error
from helpers.devices import on_devices
from helpers.groups import START_SECONDS, Ended, Processes, free_port, lost_in_the_steps, wanrun_commands
from helpers.refusals import check_json
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.manifest import read_manifest

pytestmark = pytest.mark.slow

TARGET = "cpu-data2-context2"
WINDOWS = ("--frames", 9, "--window-frames", 5)


def video(cli: Any, artifact: Path, folder: Path, *options: object) -> tuple[np.ndarray, dict[str, Any]]:
    """Makes a video; returns the latents and the timings."""
    folder.mkdir()
    latents, timings = folder / "latents.npy", folder / "timings.json"
    outputs = ("--output", folder / "o.npy", "--save-latents", latents, "--timing-json", timings)
    cli.succeeds("wanrun", "--artifact", artifact, "--prompt", "a fox", "--steps", 2, *outputs, *options)
    return np.load(latents), json.loads(timings.read_text())


@pytest.mark.thorough
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
    alone, timings = video(cli, moved, tmp_path / "alone", *WINDOWS)
    assert timings["cache_hits"] == 5 and not timings["cache_misses"]
    together, timings = video(cli, moved, tmp_path / "together", *WINDOWS, "--target", TARGET)
    assert timings["cache_hits"] == 5 and not timings["cache_misses"]
    assert together.shape == alone.shape == (1, 16, 3, 8, 12)
    assert 0 < np.abs(together - alone).max() < 1e-5 * np.abs(alone).max()


@pytest.mark.thorough
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
    command = ("wanrun", "--artifact", artifact, "--prompt", "a fox", *outputs)
    check_json(cli.fails(3, *command), "damaged", message="transformer/patch_embedding/weight")
    data[100] ^= 1
    chunk.write_bytes(data)
    entry = next((artifact / "executables" / TARGET).glob("jit_denoise_step-*"))
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    check_json(cli.fails(3, *command), "damaged", message=entry)


@pytest.mark.thorough
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


@pytest.mark.parametrize(
    ("mesh", "error", "parts"),
    [
        (
            "context=4",
            "mismatch",
            {"message": "context", "expected": 2, "found": 4, "remedy": "--mesh data=2"},
        ),
        ("x=2", "unknown_name", {"message": "--mesh", "expected": "data, ring, fsdp", "found": "'x'"}),
        ("data=4", "mismatch", {"message": "data", "found": 4}),
    ],
)
def test_impossible_meshes(
    artifact: Path, mesh: str, error: str, parts: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, and the artifact is as before."""
    before = sorted(artifact.rglob("*"))
    command = ["compile", "--artifact", str(artifact), "--size", "96x64", "--frames", "9", "--mesh", mesh]
    assert run(wanbuild, [*command, "--json-errors"]) == 2
    check_json(one_error(capsys), error, **parts)
    assert sorted(artifact.rglob("*")) == before


# Several processes.


PROMPT = ("--prompt", "a fox", "--steps", "2", "--seed", "3")


@pytest.fixture(scope="module")
def alone(mesh_artifact: Path, cli: Any, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The frames and the latents that one process makes, in windows."""
    folder = tmp_path_factory.mktemp("alone")
    video, latents = folder / "video.npy", folder / "latents.npy"
    cli.succeeds(
        *(
            "wanrun",
            "--artifact",
            mesh_artifact,
            *PROMPT,
            *WINDOWS,
            "--output",
            video,
            "--save-latents",
            latents,
        )
    )
    return [np.load(video), np.load(latents)]


def outputs(tmp_path: Path, count: int) -> list[Path]:
    """A path of a video for each process, each in a folder of its own."""
    folders = [tmp_path / f"folder{index}" for index in range(count)]
    for folder in folders:
        folder.mkdir()
    return [folder / "video.npy" for folder in folders]


def together(
    artifacts: Path, tmp_path: Path, count: int, *options: object, **of_each: Sequence[object]
) -> tuple[list[Ended], list[Path]]:
    """Runs processes to their end, errors as JSON; returns how they ended, and where each would write."""
    videos = outputs(tmp_path, count)
    each = {"output": videos, "artifact": [artifacts] * count, **of_each}
    commands = wanrun_commands(count, "--json-errors", *options, **each)
    with Processes(commands, tmp_path) as processes:
        return [processes.ended(index, START_SECONDS) for index in range(count)], videos


def slurm_step(count: int) -> list[dict[str, str]]:
    """The variables of a Slurm step's tasks on this machine; JAX takes its port from the job's number."""
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    return [{**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(count)]


def same_frames(one: np.ndarray, other: np.ndarray) -> bool:
    """The decoder's sums may have another order, as the threads of a process depend on its devices and cores:
    of 92 160 values one was seen to differ, by a level.
    """
    levels = np.abs(one.astype(int) - other)
    return bool(levels.max() <= 1 and np.count_nonzero(levels) <= 10)


@pytest.mark.thorough
def test_the_video_is_that_of_one_process(
    mesh_artifact: Path, alone: list[np.ndarray], tmp_path: Path
) -> None:
    """Four processes have a device each. Latents have the same bits."""
    count = 4
    report, latents = tmp_path / "timing.json", tmp_path / "latents.npy"
    options = (*PROMPT, *WINDOWS, "--timing-json", report, "--save-latents", latents)
    ended, (video, *others) = together(mesh_artifact, tmp_path, count, *options)
    assert [one.code for one in ended] == [0] * count, ended
    assert re.fullmatch(rf"wrote {video} \(seed 3, 9 frames of 96x64, .*B, .* s\)\n", ended[0].output)
    assert [(one.output, one.errors) for one in ended[1:]] == [("", [])] * (count - 1)
    assert ended[0].errors == []
    assert np.array_equal(np.load(latents), alone[1])
    assert same_frames(np.load(video), alone[0])
    assert sorted(file.name for file in video.parent.iterdir()) == ["video.npy", "video.npy.json"]
    assert [list(other.parent.iterdir()) for other in others] == [[]] * (count - 1)
    times = json.loads(report.read_text())
    assert times["cache_misses"] == 0 and times["cache_hits"] >= 4


@pytest.mark.thorough
def test_process_0_finds_what_is_there(mesh_artifact: Path, cli: Any, tmp_path: Path) -> None:
    """The other process sees another disk, without the first video. JAX finds both, as Slurm describes them.

    Each has two devices, and what they make is what one process makes.
    """
    lines = [json.dumps({"prompt": "a fox", "steps": 1, "seed": seed}) for seed in (3, 4)]
    prompts, folders = tmp_path / "prompts.jsonl", [path.parent for path in outputs(tmp_path, 2)]
    prompts.write_text("\n".join(lines))
    pattern = [folder / "video-{seed}.npy" for folder in folders]
    cli.succeeds("wanrun", "--artifact", mesh_artifact, "--prompts", prompts, "--output", pattern[0])
    made, expected = (folders[0] / "video-3.npy").read_bytes(), np.load(folders[0] / "video-4.npy")
    for file in folders[0].glob("video-4.npy*"):
        file.unlink()
    program = str(Path(sys.executable).with_name("wanrun"))
    options = (
        program,
        "--distributed",
        "--artifact",
        str(mesh_artifact),
        "--prompts",
        str(prompts),
        "--output",
    )
    with Processes([[*options, str(one)] for one in pattern], tmp_path, slurm_step(2)) as processes:
        second = [processes.ended(index, START_SECONDS) for index in range(2)]
    assert [one.code for one in second] == [0, 0], second
    there, *_, counts = second[0].output.splitlines()
    assert str(folders[0] / "video-3.npy") in there and re.findall(r"\d+", counts) == ["1", "1", "0"]
    assert second[1].output == "" and second[1].errors == []
    assert (folders[0] / "video-3.npy").read_bytes() == made
    assert same_frames(np.load(folders[0] / "video-4.npy"), expected)
    assert not list(folders[1].iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "code", "name", "values"),
    [
        ({"prompt": ["a fox", "a dog"]}, 2, "prompt", ("'a fox'", "'a dog'")),
        ({"seed": [3, 4]}, 2, "seed", ("'3'", "'4'")),
        ({"memory": ["auto", "low"]}, 2, "memory", ("auto", "low")),
        ({"artifact": ["mesh", "toy"]}, 3, "content digest", ("sha256:", "sha256:")),
    ],
    ids=["prompt", "seed", "memory", "artifact"],
)
def test_a_difference_is_named_before_the_first_step(
    options: dict[str, list[Any]],
    code: int,
    name: str,
    values: tuple[str, str],
    mesh_artifact: Path,
    toy_artifact: Path,
    tmp_path: Path,
) -> None:
    artifacts = {"mesh": mesh_artifact, "toy": toy_artifact}
    each: dict[str, Sequence[object]] = {"prompt": ["a fox"] * 2, "frames": [5, 5], **options}
    if "artifact" in options:
        each |= {"artifact": [artifacts[name] for name in options["artifact"]], "frames": [5, 9]}
    ended, videos = together(mesh_artifact, tmp_path, 2, **each)
    for one in ended:
        assert one.code == code, ended
        (line,) = one.errors
        expected, found = ((value, f"process {index}") for index, value in enumerate(values))
        check_json(line, "mismatch", message=f": {name};", expected=expected, found=found)
        assert one.seconds < 30
    assert not any(list(video.parent.iterdir()) for video in videos)


def test_a_process_that_cannot_start_ends_the_others(mesh_artifact: Path, tmp_path: Path) -> None:
    ended, _ = together(mesh_artifact, tmp_path, 2, "--prompt", "a fox", steps=[0, 2])
    assert [one.code for one in ended] == [2, 5]
    assert [len(one.errors) for one in ended] == [1, 1]
    check_json(ended[0].errors[0], "out_of_range", options="--steps", found=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("count", "options", "error", "parts"),
    [
        (3, (), "mismatch", {"message": "data=2,context=2", "found": 3, "remedy": "--mesh"}),
        (2, ("--allow-compile",), "conflict", {"options": "--allow-compile", "remedy": "wanbuild compile"}),
    ],
)
def test_what_several_processes_cannot_have(
    count: int,
    options: Sequence[str],
    error: str,
    parts: dict[str, object],
    mesh_artifact: Path,
    tmp_path: Path,
) -> None:
    ended, _ = together(mesh_artifact, tmp_path, count, *PROMPT, *options)
    for one in ended:
        assert one.code == 2, ended
        (line,) = one.errors
        check_json(line, error, **parts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("victim", "number", "code"), [(0, signal.SIGKILL, -9), (1, signal.SIGTERM, 143)], ids=["kill", "term"]
)
def test_one_that_is_lost_in_the_steps_ends_the_other(
    victim: int, number: signal.Signals, code: int, mesh_artifact: Path, tmp_path: Path
) -> None:
    """The other process is in a collective then, which cannot be interrupted."""
    ended = lost_in_the_steps(2, victim, number, mesh_artifact, tmp_path)
    assert ended[victim].code == code
    (line,), other = ended[1 - victim].errors, ended[1 - victim].code
    assert other == 5 and check_json(line, "process_lost")["exit_code"] == 5
