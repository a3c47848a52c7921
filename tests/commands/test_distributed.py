"""Several processes that run one artifact together: they make one video, and end together."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.groups import START_SECONDS, Ended, Processes, free_port, lost_in_the_steps, wanrun_commands

PROMPT = ("--prompt", "a fox", "--steps", "2", "--seed", "3")
WINDOWS = (*PROMPT, "--frames", "9", "--window-frames", "5")


@pytest.fixture(scope="module")
def alone(mesh_artifact: Path, cli: Any, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The frames and the latents that one process makes, in windows."""
    folder = tmp_path_factory.mktemp("alone")
    video, latents = folder / "video.npy", folder / "latents.npy"
    cli.succeeds(
        *("wanrun", "--artifact", mesh_artifact, *WINDOWS, "--output", video, "--save-latents", latents)
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
    """Runs processes to their end; returns how they ended, and where each would have written."""
    videos = outputs(tmp_path, count)
    each = {"output": videos, "artifact": [artifacts] * count, **of_each}
    commands = wanrun_commands(count, *options, **each)
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


def test_the_video_is_that_of_one_process(
    mesh_artifact: Path, alone: list[np.ndarray], tmp_path: Path
) -> None:
    """Four processes have a device each. Latents have the same bits."""
    count = 4
    report, latents = tmp_path / "timing.json", tmp_path / "latents.npy"
    options = (*WINDOWS, "--timing-json", report, "--save-latents", latents)
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
    assert "is there already" in second[0].output and "1 made, 1 skipped, 0 failed" in second[0].output
    assert second[1].output == "" and second[1].errors == []
    assert (folders[0] / "video-3.npy").read_bytes() == made
    assert same_frames(np.load(folders[0] / "video-4.npy"), expected)
    assert not list(folders[1].iterdir())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            {"prompt": ["a fox", "a dog"]},
            2,
            "the processes were given different requests: prompt; expected 'a fox' as process 0; "
            "found 'a dog' in process 1; give all of them the same options",
        ),
        (
            {"seed": [3, 4]},
            2,
            "the processes were given different requests: seed; expected '3' as process 0; "
            "found '4' in process 1; give all of them the same options",
        ),
        ({"memory": ["auto", "low"]}, 2, "the processes were given different requests: memory; expected "),
        (
            {"artifact": ["mesh", "toy"]},
            3,
            "the processes have different artifacts: content digest; expected ",
        ),
    ],
    ids=["prompt", "seed", "memory", "artifact"],
)
def test_a_difference_is_named_before_the_first_step(
    options: dict[str, list[Any]],
    code: int,
    message: str,
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
        assert len(one.errors) == 1 and one.errors[0].startswith(f"error: {message}"), ended
        assert one.seconds < 30
    assert not any(list(video.parent.iterdir()) for video in videos)


def test_a_process_that_cannot_start_ends_the_others(mesh_artifact: Path, tmp_path: Path) -> None:
    ended, _ = together(mesh_artifact, tmp_path, 2, "--prompt", "a fox", steps=[0, 2])
    assert [one.code for one in ended] == [2, 5]
    assert [len(one.errors) for one in ended] == [1, 1]
    assert ended[0].errors[0].startswith("error: --steps is out of range")


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (3, (), "the 4 devices of this target's mesh, data=2,context=2, cannot be shared evenly"),
        (2, ("--allow-compile",), "--allow-compile is not possible with several processes"),
    ],
)
def test_what_several_processes_cannot_have(
    count: int, options: Sequence[str], message: str, mesh_artifact: Path, tmp_path: Path
) -> None:
    ended, _ = together(mesh_artifact, tmp_path, count, *PROMPT, *options)
    for one in ended:
        assert one.code == 2, ended
        assert len(one.errors) == 1 and one.errors[0].startswith(f"error: {message}"), ended


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
    assert other == 5 and line.startswith("error: another process of this run has ended")
