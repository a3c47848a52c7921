"""The start of a command in a run of several processes: the plan, the others, and their agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanrun.cluster.company import JOIN_SECONDS, Company
from wanrun.cluster.join import join
from wanrun.cluster.options import check_given
from wanrun.cluster.streams import keep_stdout
from wanrun.errors import WanError
from wanrun.jobs.plan import Plan, make_plan
from wanrun.jobs.run import RunOptions
from wanrun.jobs.together import plan_together
from wanrun.timing import Timings

TELL_SECONDS = 10.0
"""How long a process that cannot start waits for the others, to tell them."""


@contextlib.contextmanager
def plan_of_several(
    artifact: Path, run: RunOptions, given: Mapping[str, Any], timings: Timings
) -> Iterator[tuple[Plan, RunOptions, Company]]:
    """Makes the plan in each process, and enters their company when all have agreed on it.

    Arguments and errors are those of ``make_plan``. A process whose plan fails tells the others why.

    Returns:
        The plan; the options, without the files that process 0 alone writes in the others; the company.

    Raises:
        ArtifactError: if the processes have different artifacts.
        UsageError: if they were given different requests, or the description of the company is wrong.
        ClusterError: if not all processes come.
    """
    check_given(run.distributed, run.coordinator, run.num_processes, run.process_id)
    try:
        plan = make_plan(artifact, run, given, timings)
    except WanError as error:
        with contextlib.suppress(WanError), _company(run, TELL_SECONDS):
            raise error
        raise
    with timings.phase("join"), contextlib.ExitStack() as leaving:
        company = leaving.enter_context(_company(run, JOIN_SECONDS))
        keep_stdout(quiet=not company.leads)
        plan = plan_together(company, plan, run)
        entered = leaving.pop_all()
    if not company.leads:
        run = replace(run, timing_json=None, timing_trace=None, trace=None)
    with entered:
        yield plan, run, company


def _company(run: RunOptions, seconds: float) -> Company:
    return join(run.coordinator, run.num_processes, run.process_id, timeout_seconds=seconds)
