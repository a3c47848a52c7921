"""What the processes of a group agree on before the first step: the artifact, and every job of the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanrun.cluster.process_group import ProcessGroup
from wanrun.jobs.run import RunOptions
from wanrun.jobs.worklist import Worklist

LOADING = ("memory", "text_encoder", "transfer")
"""The options of loading that decide which programs run, and when."""


def agreed(group: ProcessGroup, work: Worklist, run: RunOptions) -> Worklist:
    """Checks that all processes have the same artifact and the same jobs.

    Which jobs are finished is what process 0 finds, because it writes the results: the others may see other
    disks.

    Returns:
        The worklist with the jobs that process 0 has to make.

    Raises:
        ArtifactError: in every process, if their artifacts differ.
        UsageError: in every process, if their requests differ.
    """
    group.agree_on_artifact(work.manifest.digests)
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
    """Returns a job's facts, the prompt first: of several that differ, the first is named."""
    return {"prompt": metadata["prompt"], **metadata}
