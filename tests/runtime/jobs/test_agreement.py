"""What the processes of a run agree on before it: the artifact, every job, and which jobs are left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.run_options import run_options
from wanrun.cluster.process_group import ProcessGroup
from wanrun.errors import UsageError
from wanrun.jobs.agreement import agreed
from wanrun.jobs.worklist import Worklist


class Agreeing:
    """A group whose other process answers with what it is told to."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted, self.artifact, self.request = wanted, dict[str, Any](), dict[str, Any]()

    def agree_on_artifact(self, facts: dict[str, Any]) -> None:
        self.artifact = facts

    def agree_on_request(self, facts: dict[str, Any]) -> None:
        self.request = facts

    def exchange(self, value: Any) -> list[Any]:
        return [self.wanted, value]


@pytest.fixture
def several(worklist_of: Callable[..., Worklist], tmp_path: Path) -> Worklist:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\na cat\na dog\n")
    return worklist_of(prompts=prompts, output=tmp_path / "{index}.npy")


def test_process_0_says_what_is_left(several: Worklist) -> None:
    group = Agreeing([3, 1])
    work = agreed(cast(ProcessGroup, group), several, run_options())
    assert [job.entry.index for job in work.jobs] == [3, 1]
    assert [job.entry.index for job in work.finished] == [2]
    assert group.artifact == {
        "content digest": several.manifest.content_digest,
        "manifest digest": several.manifest.manifest_digest,
    }
    assert group.request["number of prompts"] == 3
    assert group.request["prompt of prompt 2"] == "a cat"
    assert {"memory", "text_encoder", "transfer", "warmup"} <= group.request.keys()


def test_one_prompt(worklist_of: Callable[..., Worklist]) -> None:
    work, group = worklist_of(prompt="a fox"), Agreeing([1])
    together = agreed(cast(ProcessGroup, group), work, run_options())
    assert list(together.jobs) == list(work.jobs) and not together.finished
    assert group.request["prompt"] == "a fox" and group.request["seed"] == 0


def test_a_difference_is_an_error(several: Worklist, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Agreeing([1])

    def differ(facts: dict[str, Any]) -> None:
        raise UsageError("the processes were given different requests: seed")

    monkeypatch.setattr(group, "agree_on_request", differ)
    with pytest.raises(UsageError, match="different requests: seed"):
        agreed(cast(ProcessGroup, group), several, run_options())
