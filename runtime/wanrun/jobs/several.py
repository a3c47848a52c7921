"""The start of a command in a run of several processes: the worklist, the others, and their agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from wanrun.artifact.artifact import Artifact
from wanrun.cluster.join import join
from wanrun.cluster.process_group import JOIN_SECONDS, ProcessGroup
from wanrun.cluster.streams import keep_stdout
from wanrun.errors import WanError
from wanrun.jobs.run import RunOptions
from wanrun.jobs.worklist import Worklist, make_worklist
from wanrun.terminal.status import Status
from wanrun.timing.timings import Timings

TELL_SECONDS = 10.0
"""How long a process that cannot start waits for the others, to tell them."""

LOADING = ("memory", "transfer")
"""The options of loading that decide which programs run, and when."""


@contextlib.contextmanager
def worklist_of_several(
    opened: Callable[[], Artifact], run: RunOptions, given: Mapping[str, Any], timings: Timings
) -> Iterator[tuple[Worklist, RunOptions, ProcessGroup]]:
    """Makes the worklist in each process, and enters their group when all have agreed on it.

    Arguments and errors are those of ``make_worklist``. A process whose worklist fails tells the others why.
    Yields the worklist; the options, in the others without the files that process 0 alone writes; the group.

    Raises:
        ArtifactError: if the processes have different artifacts.
        UsageError: if they were given different requests, or the description of the group is wrong.
        ClusterError: if not all processes come.
    """
    try:
        work = make_worklist(opened, run, given, timings)
    except WanError as error:
        with contextlib.suppress(WanError), _group(run, TELL_SECONDS):
            raise error
        raise
    waiting = Status(lambda: timings.running)
    with timings.phase("join"), waiting, contextlib.ExitStack() as leaving:
        group = leaving.enter_context(_group(run, JOIN_SECONDS))
        keep_stdout(quiet=not group.leads)
        work = agreed(group, work, run)
        entered = leaving.pop_all()
    if not group.leads:
        run = structs.replace(run, timing_json=None, report=None)
    with entered:
        yield work, run, group


def _group(run: RunOptions, seconds: float) -> ProcessGroup:
    return join(run.coordinator, run.num_processes, run.process_id, timeout_seconds=seconds)


def agreed(group: ProcessGroup, work: Worklist, run: RunOptions) -> Worklist:
    """Checks that all processes have the same artifact and jobs; returns those that process 0 has to make.

    Which jobs are finished is what process 0 finds, because it writes the results: the others may see other
    disks.

    Raises:
        ArtifactError: in every process, if their artifacts differ.
        UsageError: in every process, if their requests differ.
    """
    group.agree_on_artifact(work.artifact.manifest.digests)
    jobs = {job.entry.index: job for job in (*work.jobs, *work.finished)}
    facts: dict[str, Any] = {"number of prompts": len(jobs)}
    for index in sorted(jobs):
        place = f" of prompt {index}" if work.many else ""
        facts |= {f"{name}{place}": fact for name, fact in _facts(jobs[index].metadata).items()}
    facts |= {name: getattr(run.loading, name) for name in LOADING} | {"warmup": run.warmup}
    group.agree_on_request(facts)
    wanted = group.exchange([job.entry.index for job in work.jobs])[0]
    return replace(
        work,
        jobs=[jobs[index] for index in wanted],
        finished=[jobs[index] for index in sorted(jobs.keys() - set(wanted))],
    )


def _facts(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a job's facts, the prompt first: of several that differ, the first is named. The address of the
    artifact may differ."""
    return {"prompt": metadata["prompt"], **{key: metadata[key] for key in metadata if key != "artifact"}}
