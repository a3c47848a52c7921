"""Jobs of an array share the prompts of a file: each prompt is made once, by whatever scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.options import run_options
from helpers.refusals import refuses
from wancli.jobs.worklist import Worklist, make_worklist
from wanfleet.shard import ARRAYS, AUTO, Shard, find_shard, told_number
from wanrun.artifact.artifact import open_artifact
from wanrun.codes import ErrorCode
from wanrun.timing.timings import Timings

COUNT = 3

CONVENTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "kubernetes": (AUTO, {"JOB_COMPLETION_INDEX": "{}", "JOB_COMPLETIONS": str(COUNT)}),
    "slurm": (AUTO, {"SLURM_ARRAY_TASK_ID": "{}", "SLURM_ARRAY_TASK_COUNT": str(COUNT)}),
    "skypilot": (AUTO, {"SKYPILOT_JOB_RANK": "{}", "SKYPILOT_NUM_JOBS": str(COUNT)}),
    "aws": (AUTO, {"AWS_BATCH_JOB_ARRAY_INDEX": "{}", "AWS_BATCH_JOB_ARRAY_SIZE": str(COUNT)}),
    "given": ("{}/3", {}),  # counts from 1, as {index} does; schedulers count from 0
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Seven prompts, and a line that cannot be used."""
    path = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "cat {number}"}}' for number in range(7)]
    path.write_text("\n".join([*lines[:4], '{"prompt": "cat", "num_steps": "many"}', *lines[4:]]))
    return path


def shared(
    artifact: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    convention: str,
    number: int,
    whole: bool = False,
) -> Worklist:
    """The worklist of one job; of one that has all prompts, if it does not say that it shares them."""
    given, variables = CONVENTIONS[convention]
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(number))
    run = run_options(
        prompts=prompts,
        output=prompts.with_name("{index}.npy"),
        shard=None if whole else given.format(number + 1),
    )
    return make_worklist(lambda: open_artifact(artifact), run, {"num_steps": 1}, Timings())


@pytest.mark.slow
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_prompt_is_of_one_job(
    artifact: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    convention: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    works = [shared(artifact, prompts, monkeypatch, convention, number) for number in range(COUNT)]
    indexes = [[job.entry.index for job in work.jobs] for work in works]
    assert indexes == [[1, 4, 7], [2, 8], [3, 6]]
    names = [job.videos[0].name for work in works for job in work.jobs]
    assert sorted(names) == [f"{index}.npy" for index in (1, 2, 3, 4, 6, 7, 8)]
    assert [len(work.failures) for work in works] == [0, 1, 0]  # the line is reported once
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("shard 1/3") and said[0].endswith(": 3 of 8 prompts")
    # Variables alone take no prompt away: whoever has split the file himself would lose most of it.
    all_of_them = shared(artifact, prompts, monkeypatch, convention, 1, whole=True)
    assert len(all_of_them.jobs) == 7
    variables = CONVENTIONS[convention][1]
    line = f"{next(iter(variables), '')} is set, and all 8 prompts are made here: --shard auto makes"
    assert capsys.readouterr().err.startswith(line if variables else "")


def test_a_share_without_prompts_says_so(
    artifact: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text("a cat\na dog\n")
    assert not shared(artifact, prompts, monkeypatch, "slurm", 2).jobs
    said = capsys.readouterr().err
    assert said.startswith("shard 3/3 (SLURM_ARRAY_TASK_ID): 0 of 2 prompts: there are more jobs than")


def test_slurm_arrays_that_begin_elsewhere_or_skip() -> None:
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5"}
    numbers = [find_shard(AUTO, {**slurm, "SLURM_ARRAY_TASK_ID": text}) for text in ("10", "15", "20")]
    assert [shard.number for shard in numbers] == [1, 2, 3]


def test_a_given_share_is_none_of_the_variables() -> None:
    assert find_shard("1/1", {"JOB_COMPLETION_INDEX": "7"}) == Shard(1, 1)


def test_an_array_that_tells_both_numbers_is_taken() -> None:
    """Not the first one, which may be that of a cluster inside a job of another."""
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3"}
    assert find_shard(AUTO, {"JOB_COMPLETION_INDEX": "0", **slurm}) == Shard(2, 3, "SLURM_ARRAY_TASK_ID")
    assert told_number({"JOB_COMPLETION_INDEX": "0", **slurm}) == "SLURM_ARRAY_TASK_ID"
    assert told_number({"JOB_COMPLETION_INDEX": "0"}) == "JOB_COMPLETION_INDEX"


KUBERNETES = ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")


@pytest.mark.parametrize(
    ("given", "told", "code", "parts"),
    [
        ("1/2/3", (), "invalid_value", {"expected": "I/N", "found": "1/2/3"}),
        ("-1/2", (), "invalid_value", {}),
        ("3", ("0",), "invalid_value", {}),
        ("0/3", (), "out_of_range", {"expected": "1/3 to 3/3", "found": "0/3", "remedy": "--shard auto"}),
        ("4/3", (), "out_of_range", {"found": "4/3"}),
        ("0/0", (), "out_of_range", {"expected": "1 to 1000000 ", "found": 0}),
        (AUTO, (), "missing_parameter", {"expected": "JOB_COMPLETION_INDEX, ", "remedy": "--shard I/N"}),
        (AUTO, ("0",), "missing_parameter", {"expected": "JOB_COMPLETIONS", "remedy": "--shard"}),
        (AUTO, ("x", "3"), "wrong_type", {"what": "JOB_COMPLETION_INDEX", "found": "'x'"}),
        (AUTO, ("1", ""), "wrong_type", {"what": "JOB_COMPLETIONS"}),
        (
            AUTO,
            ("2", "2"),
            "out_of_range",
            {"what": "(JOB_COMPLETION_INDEX)", "expected": "0 to 1 ", "found": 2},
        ),
    ],
)
def test_what_is_no_share(given: str, told: Sequence[str], code: ErrorCode, parts: dict[str, Any]) -> None:
    with refuses(code, **parts):
        find_shard(given, dict(zip(KUBERNETES, told, strict=False)))


def test_a_share_needs_a_file(artifact: Path, tmp_path: Path) -> None:
    run = run_options(prompt="a", shard="0/2", output=tmp_path / "a.npy")
    with refuses("no_effect", what="--shard", remedy="--prompts"):
        make_worklist(lambda: open_artifact(artifact), run, {}, Timings())


@pytest.mark.thorough
def test_processes_share_a_file_and_a_killed_one_is_repeated(toy_artifact: Path, tmp_path: Path) -> None:
    """No video is missing, none is made twice, and what was finished stays."""
    (tmp_path / "prompts.txt").write_text("".join(f"cat {number}\n" for number in range(6)))
    command = [sys.executable, "-m", "wanrun", str(toy_artifact), "--prompts", str(tmp_path / "prompts.txt")]
    command += ["--steps", "1", "-o", str(tmp_path / "{index}.npy"), "--shard", AUTO]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def started(number: int) -> subprocess.Popen[str]:
        variables = {**environment, "JOB_COMPLETION_INDEX": str(number), "JOB_COMPLETIONS": "2"}
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)

    first, second = started(0), started(1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "1.npy").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("[1-6].npy")}
    again = started(0)
    said, others = again.communicate()[0], second.communicate()[0]
    assert (again.returncode, second.returncode) == (0, 0)
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == [f"{index}.npy" for index in range(1, 7)]
    kept = {path for path in before if path.name in ("1.npy", "3.npy", "5.npy")}
    assert kept and {path: path.stat().st_mtime_ns for path in before} == before
    assert f"{3 - len(kept)} made, {len(kept)} skipped" in said
    assert "3 made" in others and " 0 skipped" in others


def test_the_variables_are_of_five_conventions() -> None:
    """The four schedulers', and the option."""
    told = {name for _, variables in CONVENTIONS.values() for name in variables}
    assert {array.number for array in ARRAYS} <= told and len(CONVENTIONS) == 5
