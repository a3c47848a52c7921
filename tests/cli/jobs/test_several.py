"""The start of a run of several processes: what they agree on, and who writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.options import run_options
from wancli.jobs import several
from wancli.jobs.several import agreed, worklist_of_several
from wancli.jobs.worklist import Worklist
from wanrun.artifact.artifact import open_artifact
from wanrun.cluster.process_group import ProcessGroup
from wanrun.errors import ClusterError
from wanrun.terminal import status
from wanrun.timing.timings import Timings


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
def listed(worklist_of: Callable[..., Worklist], tmp_path: Path) -> Worklist:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\na cat\na dog\n")
    return worklist_of(prompts=prompts, output=tmp_path / "{index}.npy")


def test_process_0_says_what_is_left(listed: Worklist) -> None:
    group = Agreeing([3, 1])
    work = agreed(cast(ProcessGroup, group), listed, run_options())
    assert [job.entry.index for job in work.jobs] == [3, 1]
    assert [job.entry.index for job in work.finished] == [2]
    assert group.artifact == {
        "content digest": listed.artifact.manifest.content_digest,
        "manifest digest": listed.artifact.manifest.manifest_digest,
    }
    assert group.request["number of prompts"] == 3
    assert "a cat" in group.request.values()
    assert {"memory", "transfer", "warmup"} <= group.request.keys()


def test_one_prompt(worklist_of: Callable[..., Worklist]) -> None:
    work, group = worklist_of(prompt="a fox"), Agreeing([1])
    together = agreed(cast(ProcessGroup, group), work, run_options())
    assert list(together.jobs) == list(work.jobs) and not together.finished
    assert group.request["prompt"] == "a fox" and group.request["seed"] == 0


def test_waiting_for_the_others_is_said(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def nobody_comes(*_: object) -> Iterator[ProcessGroup]:
        time.sleep(0.5)
        raise ClusterError("process_lost", "not all processes have started")
        yield

    monkeypatch.setattr(status, "LOG_SECONDS", 0.05)
    monkeypatch.setattr(several, "join", nobody_comes)
    who: dict[str, Any] = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 0}
    options = run_options(prompt="a fox", output=tmp_path / "a.npy", **who)
    with (
        pytest.raises(ClusterError),
        worklist_of_several(lambda: open_artifact(artifact), options, {}, Timings()),
    ):
        pass
    assert capsys.readouterr().err.startswith("waiting: ")


@pytest.mark.parametrize("leads", [True, False])
def test_process_0_alone_writes_files_beside_videos(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    group: Any = Agreeing([1])
    group.leads = leads
    monkeypatch.setattr(several, "join", lambda *who: contextlib.nullcontext(group))
    monkeypatch.setattr(several, "keep_stdout", lambda quiet: None)
    who: dict[str, Any] = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": int(not leads)}
    files = {"timing_json": tmp_path / "t.json", "report": tmp_path / "r.html"}
    options = run_options(prompt="a fox", output=tmp_path / "a.npy", **who, **files)
    with worklist_of_several(lambda: open_artifact(artifact), options, {}, Timings()) as (_, how, _):
        assert {name: getattr(how, name) for name in files} == (files if leads else dict.fromkeys(files))
