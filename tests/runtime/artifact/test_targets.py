"""What the manifest says of targets: entries of a cache in the artifact, for a machine of known facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from helpers.manifests import ENVIRONMENT
from helpers.refusals import refuses
from wanrun.artifact.targets import Executable, Requirements, Target
from wanrun.errors import ArtifactError


def target(**changes: Any) -> Target:
    plain: dict[str, Any] = {
        "program_set": "cpu-0",
        "folder": "executables/cpu",
        "environment": dict(ENVIRONMENT),
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
    with refuses("untrusted", ArtifactError, what="a target", found=repr(path)):
        target(folder=path)
    with refuses("untrusted", ArtifactError, what="an executable", found=repr(path)):
        Executable(path, 3, "0")


@pytest.mark.parametrize("fact", ENVIRONMENT)
def test_every_fact_of_the_machine_is_there(fact: str) -> None:
    without = {name: value for name, value in ENVIRONMENT.items() if name != fact}
    for wrong in (without, {**ENVIRONMENT, fact: []}):
        with pytest.raises(msgspec.ValidationError, match=fact):
            target(environment=wrong)


@pytest.mark.parametrize("facts", [{"topology": 3}, {"topology": "1", "device_kinds": "cpu"}])
def test_facts_of_another_type(facts: Mapping[str, Any]) -> None:
    target(environment={**ENVIRONMENT, "topology": "1", "device_kinds": ["cpu"], "other": 1})
    with pytest.raises(msgspec.ValidationError):
        target(environment={**ENVIRONMENT, **facts})


def test_a_size_below_zero_is_no_size() -> None:
    with pytest.raises(msgspec.ValidationError, match=r">= 0"):
        msgspec.json.decode(b'{"file": "a", "bytes": -1, "sha256": "0"}', type=Executable)
