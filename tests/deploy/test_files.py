"""The Dockerfile, the script for Slurm, and the files for SkyPilot: their keys are those of its schemas."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from helpers.deploy import DEPLOY, REPOSITORY, dockerfile, unknown

SCRIPT: Final = DEPLOY / "slurm" / "videos.sbatch"
SHELLCHECK: Final = Path(sys.executable).with_name("shellcheck")

WANRUN: Final = """#!/bin/bash
printf '%s\\n' "$@" > "$PLACE/arguments"
trap 'exit 143' TERM
touch "$PLACE/runs"
[[ $ENDS ]] && exit "$ENDS"
for _ in {1..500}; do sleep 0.02; done
"""

NUMBERS: Final = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "7"}
"""Of the last task of an array, whose job has the array's own number."""


@dataclass
class Task:
    """A task of the array that runs here."""

    place: Path
    process: subprocess.Popen[str]

    def end(self, number: signal.Signals | None = None) -> int:
        """Waits until wanrun runs, sends the script a signal, and waits for its end."""
        end = time.monotonic() + 10
        while not (self.place / "runs").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        if number is not None:
            self.process.send_signal(number)
        self.said = self.process.communicate(timeout=10)[1]
        return self.process.returncode

    @property
    def put_back(self) -> list[str]:
        """What scontrol was told."""
        file = self.place / "scontrol"
        return file.read_text().splitlines() if file.exists() else []


def begin(tmp_path: Path, ends: str = "", **variables: str) -> Task:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "wanrun").write_text(WANRUN)
    (programs / "scontrol").write_text('#!/bin/bash\necho "$@" >> "$PLACE/scontrol"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PLACE": str(tmp_path), "ENDS": ends}
    process = subprocess.Popen(
        ["bash", SCRIPT, "/shared/an artifact", "/shared/prompts.txt", "/shared/videos"],
        env={**environment, **NUMBERS, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    return Task(tmp_path, process)


def directives() -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == SCRIPT.read_text(encoding="utf-8").count("#SBATCH")
    return dict(lines)


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run([SHELLCHECK, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0


def test_directives_come_before_the_commands() -> None:
    """sbatch reads none after the first command."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_a_task_has_a_gpu_a_log_and_time_to_end() -> None:
    given = directives()
    assert given["array"].startswith("0-") and given["gres"] == "gpu:1" and given["ntasks"] == "1"
    assert {"%A", "%a"} <= set(re.findall(r"%\w", given["output"])) and given["open-mode"] == "append"
    assert "requeue" in given
    hours, minutes, seconds = map(int, given["time"].split(":"))
    batch, ahead = re.fullmatch(r"(B):USR1@(\d+)", given["signal"]).groups()  # type: ignore[union-attr]
    assert batch == "B" and 60 < int(ahead) < hours * 3600 + minutes * 60 + seconds


def test_options_exist(tmp_path: Path) -> None:
    assert begin(tmp_path, "0").end() == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[0] == "/shared/an artifact" and "/shared/prompts.txt" in arguments
    assert arguments[-1] == "/shared/videos/{index}-{slug}.mp4"
    assert unknown(arguments) == set()
    assert arguments[arguments.index("--shard") + 1] == "auto"
    assert shlex.join(arguments).count("--") == 3  # so all options are seen


@pytest.mark.parametrize(
    ("ends", "number", "restarts", "code", "put_back"),
    [
        *((str(code), None, "", code, []) for code in (0, 2, 3)),
        ("", signal.SIGUSR1, "3", 143, ["requeue 77_7"]),  # before the time limit
        ("", signal.SIGUSR1, "20", 143, []),  # it never ends
        ("", signal.SIGTERM, "3", 143, []),  # it is cancelled
    ],
)
def test_its_end_is_that_of_wanrun(
    tmp_path: Path, ends: str, number: signal.Signals | None, restarts: str, code: int, put_back: list[str]
) -> None:
    task = begin(tmp_path, ends, SLURM_RESTART_COUNT=restarts)
    assert task.end(number) == code and task.put_back == put_back
    assert ("started 21 times" in task.said) == (restarts == "20")


def test_a_refusal_to_put_it_back_keeps_the_exit_code(tmp_path: Path) -> None:
    task = begin(tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    assert task.end(signal.SIGUSR1) == 143


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "/artifact"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "ARTIFACT PROMPTS FOLDER" in done.stderr


FOLDER: Final = DEPLOY / "skypilot"
TASK: Final = frozenset({"name", "pool", "resources", "workdir", "file_mounts", "setup", "run", "envs"})
"""Those keys of a task that the files may have, of ``get_task_schema`` in SkyPilot's ``utils/schemas.py``."""
RESOURCES: Final = frozenset({"accelerators", "disk_size"})
STORAGE: Final = frozenset({"name", "source", "store", "mode"})
MODES: Final = frozenset({"MOUNT", "COPY", "MOUNT_CACHED"})


def read(name: str) -> dict[str, Any]:
    task = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(task, dict)
    return task


@pytest.mark.parametrize("name", ["pool.yaml", "job.yaml"])
def test_keys_are_those_of_the_schema(name: str) -> None:
    task = read(name)
    assert task.keys() <= TASK and task["resources"].keys() <= RESOURCES
    for place, mount in task.get("file_mounts", {}).items():
        if isinstance(mount, str):
            assert (REPOSITORY / mount).is_file(), place
        else:
            assert mount.keys() <= STORAGE and mount["mode"] in MODES
    assert all(isinstance(value, str) for value in task.get("envs", {}).values())


def test_a_pool_makes_machines_and_a_job_uses_them() -> None:
    pool, job = read("pool.yaml"), read("job.yaml")
    assert pool["pool"].keys() == {"workers"} and "run" not in pool
    assert not job.keys() & {"pool", "setup", "workdir", "file_mounts"}
    assert job["resources"]["accelerators"] == pool["resources"]["accelerators"]
    (prompts,) = (place for place in pool["file_mounts"] if place.endswith(".txt"))
    command = shlex.split(job["run"].strip())
    assert command[command.index("--prompts") + 1] == prompts
    folder, _, name = command[command.index("--output") + 1].rpartition("/")
    assert pool["file_mounts"][folder]["mode"] == "MOUNT_CACHED" and "{index}" in name


def test_commands_are_ours() -> None:
    pool, job = read("pool.yaml"), read("job.yaml")
    program, *arguments = shlex.split(job["run"].strip())
    assert program == "~/wanrun/bin/wanrun"
    (made,) = (line.split() for line in pool["setup"].splitlines() if "uv venv " in line)
    assert "--allow-existing" in made and made[-1] == "~/wanrun"
    assert unknown(arguments) == set() and arguments[arguments.index("--shard") + 1] == "auto"
    variables = set(re.findall(r"\$(\w+)", job["run"]))
    assert variables == job["envs"].keys()
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (used,) = re.findall(r"'\.\[([\w,]+)\]'", pool["setup"])
    assert set(used.split(",")) <= extras["optional-dependencies"].keys()
    assert pool["workdir"] == "." and "--constraint constraints.txt" in pool["setup"]
    assert (REPOSITORY / "constraints.txt").is_file()


# The Dockerfile's images: which there are, and how the versions of their packages are chosen.


TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
PAGES = [REPOSITORY / "Dockerfile", DEPLOY / "README.md", REPOSITORY / "docs" / "serving.md"]


def stages() -> dict[str, str]:
    """Each stage by its name, with what it begins with."""
    return {name: origin for origin, name in re.findall(r"^FROM (\S+) AS (\w+)$", TEXT, re.MULTILINE)}


def part(name: str) -> str:
    """The lines of a stage."""
    (lines,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(lines)


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, REPOSITORY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_server_is_the_runtime_with_an_artifact() -> None:
    """One more layer, and nothing that the runtime has already."""
    assert stages()["serve"] == "runtime" and list(stages())[-1] == "serve"  # what is built without a target
    assert [line.split()[0] for line in part("serve").split("\n") if line] == ["ARG", "COPY"]
    assert "ARTIFACT" not in part("runtime").replace("WANRUN_ARTIFACT", "")
    assert "/artifact" in dockerfile("COPY")[-1].split()


def test_targets_and_arguments_that_pages_name_exist() -> None:
    arguments = {line.split("=")[0] for line in dockerfile("ARG")}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"(?:--target |target: )(runtime|serve|build)\b", text)
        given = re.findall(r"--build-arg (\w+)=", text)
        assert targets and set(targets) <= stages().keys(), page
        assert set(given) <= arguments, page


def test_options_in_its_examples_exist() -> None:
    examples = " ".join(line[1:].strip() for line in TEXT.splitlines() if line.startswith("#   ")).replace(
        "\\ ", ""
    )
    found = re.findall(r" (?:wan|wanrun) ((?:--prompt|serve) .*?)(?= docker |$)", examples)
    assert len(found) == 3
    for arguments in found:
        assert unknown(shlex.split(arguments)) == set(), arguments


@pytest.mark.parametrize(
    ("requirements", "others"),
    [(None, {"jax==1", "numpy==2", "jax-cuda13-pjrt==1"}), ("jax==5\n# numpy==1\n", {"numpy==2"})],
)
def test_versions_are_the_artifacts_or_ours(
    tmp_path: Path, requirements: str | None, others: set[str]
) -> None:
    """The command of the stage ``wheels`` up to pip, with and without an artifact in the context.

    jax's plug-ins have its versions, so none of ours binds them once the artifact has its own.
    """
    (command,) = (line for line in dockerfile("RUN") if "pip wheel" in line)
    command = command.replace("/artifact/", f"{tmp_path}/").replace("/own", f"{tmp_path}/own")
    command = command.replace("/others", f"{tmp_path}/others").replace("pip wheel", "printf '%s '")
    (tmp_path / "constraints.txt").write_text("jax==1\nnumpy==2\njax-cuda13-pjrt==1\n")
    if requirements is not None:
        (tmp_path / "requirements.txt").write_text(requirements)
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "EXTRA": "cuda13,hub"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set((tmp_path / "others").read_text().split()) == others
    assert done.stdout.split()[-1] == ".[serve,cuda13,hub]"
