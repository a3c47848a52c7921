"""The start of a run of several processes: they join, each makes the worklist, and all agree on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from wancli.jobs.run_options import RunOptions
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

    Arguments and errors are those of ``make_worklist``. Yields the worklist; the options, which in other
    processes lack the files that only process 0 writes; the group. Raises ArtifactError for different
    artifacts, UsageError for different requests or a wrong description of the group, and ClusterError if
    another process is gone.
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

    Process 0 decides which jobs are finished, because it writes the results: the others may see other disks.
    Every process raises ArtifactError if the artifacts differ, and UsageError if the requests do.
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
    """Returns a job's facts without the artifact's address; the prompt is first, to be named first."""
    return {"prompt": metadata["prompt"], **{key: metadata[key] for key in metadata if key != "artifact"}}
