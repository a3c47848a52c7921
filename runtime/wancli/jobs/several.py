"""The start of a command in a run of several processes: the worklist, the others, and their agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from wancli.jobs.run import RunOptions
from wancli.jobs.worklist import Worklist, make_worklist
from wancli.parent import tell_parent
from wancli.streams import keep_stdout
from wanrun import Artifact, Timings, join
from wanrun.cluster.process_group import ProcessGroup
from wanrun.terminal.status import Status

LOADING = ("memory", "transfer")
"""The options of loading that decide which programs run, and when."""


@contextlib.contextmanager
def worklist_of_several(
    opened: Callable[[], Artifact], run: RunOptions, given: Mapping[str, Any], timings: Timings
) -> Iterator[tuple[Worklist, RunOptions, ProcessGroup]]:
    """Enters the group of the processes, and makes the worklist in each, until all have agreed on it.

    Arguments and errors are those of ``make_worklist``. Yields the worklist; the options, in the others
    without the files that process 0 alone writes; the group.

    Raises:
        ArtifactError: if the processes have different artifacts.
        UsageError: if they were given different requests, or the description of the group is wrong.
        ClusterError: if another process is gone.
    """
    waiting = Status(lambda: timings.running)
    with contextlib.ExitStack() as entered:
        with timings.phase("join"), waiting:
            group = entered.enter_context(join(run.coordinator, run.num_processes, run.process_id))
            tell_parent()
            keep_stdout(quiet=not group.leads)
            work = agreed(group, make_worklist(opened, run, given, timings), run)
        if group.leads:
            tell_parent(_folders(work, run))
        else:
            run = structs.replace(run, timing_json=None, report=None)
        yield work, run, group


def _folders(work: Worklist, run: RunOptions) -> set[Path]:
    """Returns the folders that process 0 writes to."""
    outputs = [output.path for one in work.jobs for output in one.job.outputs]
    return {file.parent for file in (run.timing_json, run.report, *outputs) if file is not None}


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
    """Returns a job's facts but the artifact's address; the prompt is the first, to be named as different."""
    return {"prompt": metadata["prompt"], **{key: metadata[key] for key in metadata if key != "artifact"}}
