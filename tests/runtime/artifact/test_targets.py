"""What the manifest says of targets: entries of a cache in the artifact, for a machine of known facts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from wanrun.artifact.targets import Executable, Requirements, Target
from wanrun.errors import ArtifactError
from wanrun.machine.environment import ENVIRONMENT_FACTS

ENVIRONMENT = {name: kind() for name, kind in ENVIRONMENT_FACTS.items()}


def target(**changes: Any) -> Target:
    plain: dict[str, Any] = {
        "program_set": "cpu-0",
        "folder": "executables/cpu",
        "environment": ENVIRONMENT,
        "requirements": Requirements(file="requirements.txt", sha256="0"),
        "executables": {"p": {"prepare": Executable("entry", 3, "0")}},
        "statistics": {},
    }
    return Target(**{**plain, **changes})


def test_a_target_is_written_and_read() -> None:
    data = msgspec.json.encode(target())
    assert b'"bytes":3' in data  # as the manifest spells the size
    assert msgspec.json.decode(data, type=Target) == target()


@pytest.mark.parametrize("path", ["/tmp", "..", "a/../b", ""])
def test_paths_stay_in_the_artifact(path: str) -> None:
    with pytest.raises(ArtifactError, match="a target names a path outside the artifact"):
        target(folder=path)
    with pytest.raises(ArtifactError, match="an executable names a path outside the artifact"):
        Executable(path, 3, "0")


@pytest.mark.parametrize("fact", ENVIRONMENT_FACTS)
def test_every_fact_of_the_machine_is_there(fact: str) -> None:
    without = {name: value for name, value in ENVIRONMENT.items() if name != fact}
    with pytest.raises(ValueError, match=f"^{fact} of a target's environment is None"):
        target(environment=without)
    with pytest.raises(ValueError, match=rf"^{fact} of a target's environment is \[\]"):
        target(environment={**ENVIRONMENT, fact: []})


def test_a_size_below_zero_is_no_size() -> None:
    with pytest.raises(msgspec.ValidationError, match=r">= 0"):
        msgspec.json.decode(b'{"file": "a", "bytes": -1, "sha256": "0"}', type=Executable)
