"""The files for SkyPilot. Its package is too large for a test; the keys are those of its schemas, 0.14.1."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any, Final

import pytest
import yaml

from helpers.deploy import DEPLOY, REPOSITORY, unknown

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
