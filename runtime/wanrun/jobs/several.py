"""The start of a command in a run of several processes: the worklist, the others, and their agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from wanrun.cluster.join import join
from wanrun.cluster.launch import check_given
from wanrun.cluster.process_group import JOIN_SECONDS, ProcessGroup
from wanrun.cluster.streams import keep_stdout
from wanrun.errors import WanError
from wanrun.jobs.agreement import agreed
from wanrun.jobs.run import RunOptions
from wanrun.jobs.worklist import Worklist, make_worklist
from wanrun.timing.timings import Timings

TELL_SECONDS = 10.0
"""How long a process that cannot start waits for the others, to tell them."""


@contextlib.contextmanager
def worklist_of_several(
    artifact: Path, run: RunOptions, given: Mapping[str, Any], timings: Timings
) -> Iterator[tuple[Worklist, RunOptions, ProcessGroup]]:
    """Makes the worklist in each process, and enters their group when all have agreed on it.

    Arguments and errors are those of ``make_worklist``. A process whose worklist fails tells the others why.

    Returns:
        The worklist; the options, without the files that process 0 alone writes in the others; the group.

    Raises:
        ArtifactError: if the processes have different artifacts.
        UsageError: if they were given different requests, or the description of the group is wrong.
        ClusterError: if not all processes come.
    """
    check_given(run.distributed, run.coordinator, run.num_processes, run.process_id)
    try:
        work = make_worklist(artifact, run, given, timings)
    except WanError as error:
        with contextlib.suppress(WanError), _group(run, TELL_SECONDS):
            raise error
        raise
    with timings.phase("join"), contextlib.ExitStack() as leaving:
        group = leaving.enter_context(_group(run, JOIN_SECONDS))
        keep_stdout(quiet=not group.leads)
        work = agreed(group, work, run)
        entered = leaving.pop_all()
    if not group.leads:
        run = structs.replace(run, timing_json=None, timing_trace=None, trace=None)
    with entered:
        yield work, run, group


def _group(run: RunOptions, seconds: float) -> ProcessGroup:
    return join(run.coordinator, run.num_processes, run.process_id, timeout_seconds=seconds)
