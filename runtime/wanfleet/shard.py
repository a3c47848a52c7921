"""The prompts of a file that one job of many makes: every N-th, from its own number on.

| scheduler | this job's number | how many jobs there are |
|---|---|---|
| Kubernetes, Indexed Job | JOB_COMPLETION_INDEX | JOB_COMPLETIONS, which docs/deploy's Job sets |
| Slurm, array | SLURM_ARRAY_TASK_ID, from .._MIN on in steps of .._STEP | SLURM_ARRAY_TASK_COUNT |
| SkyPilot, jobs of a pool | SKYPILOT_JOB_RANK | SKYPILOT_NUM_JOBS |
| AWS Batch, array | AWS_BATCH_JOB_ARRAY_INDEX | AWS_BATCH_JOB_ARRAY_SIZE |

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode,
https://slurm.schedmd.com/job_array.html, https://docs.skypilot.co/en/latest/examples/pools.html,
https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html.
"""

from __future__ import annotations

__all__ = ["AUTO", "find_shard", "told_number"]

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from wanrun.errors import UsageError

AUTO: Final = "auto"
"""The share that a scheduler's variables give."""

MOST: Final = 10**6
"""The largest number of jobs."""


class _Array(NamedTuple):
    """The variables of a scheduler's array of jobs."""

    number: str
    size: str
    first: str = ""
    step: str = ""


_SLURM: Final = "SLURM_ARRAY_TASK"
ARRAYS: Final = (
    _Array("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
    _Array(f"{_SLURM}_ID", f"{_SLURM}_COUNT", f"{_SLURM}_MIN", f"{_SLURM}_STEP"),
    _Array("SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"),
    _Array("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)


@dataclass(frozen=True)
class Shard:
    """A share of the prompts, job ``number`` of ``count``.

    ``number`` is from 1, as ``{index}`` counts prompts: job I makes prompt I first. ``variable`` is the
    variable that it is from; empty if it was given.
    """

    number: int
    count: int
    variable: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST:
            raise UsageError(
                "out_of_range", "--shard is out of range", expected=f"1 to {MOST} jobs", found=self.count
            )
        if 1 <= self.number <= self.count:
            return
        if self.variable:  # a scheduler counts from 0
            raise UsageError(
                "out_of_range",
                f"--shard is out of range ({self.variable})",
                expected=f"a number from 0 to {self.count - 1} of {self.count} jobs",
                found=self.number - 1,
            )
        raise UsageError(
            "out_of_range",
            "--shard is out of range",
            expected=f"1/{self.count} to {self.count}/{self.count}, counted from 1 like {{index}}",
            found=f"{self.number}/{self.count}",
            remedy=f"add 1 to numbers that count from 0, or pass --shard {AUTO} in an array of jobs",
        )

    def has(self, index: int) -> bool:
        """Whether a prompt is this job's; ``index`` counts from 1."""
        return (index - self.number) % self.count == 0

    def __str__(self) -> str:
        return f"shard {self.number}/{self.count}" + (f" ({self.variable})" if self.variable else "")


def find_shard(given: str, environment: Mapping[str, str]) -> Shard:
    """Returns the share of this job.

    Args:
        given: ``I/N``, or ``AUTO`` if a scheduler's variables give both.
        environment: the variables.

    Raises:
        UsageError: for another form, a number out of range, or if no scheduler gives both numbers.
    """
    if (form := re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", given)) is not None:
        return Shard(int(form[1]), int(form[2]))
    if given != AUTO:
        raise UsageError(
            "invalid_value",
            "--shard is no share",
            expected=f"I/N, with I from 1, or {AUTO}",
            found=given[:80],
        )
    array = _array(environment)
    if array is None:
        raise UsageError(
            "missing_parameter",
            f"--shard {AUTO} finds no number of this job",
            expected="one of " + ", ".join(one.number for one in ARRAYS),
            remedy="pass --shard I/N, or leave it out to make all prompts",
        )
    if array.size not in environment:
        raise UsageError(
            "missing_parameter",
            f"{array.number} is set, and how many jobs there are is not told",
            expected=array.size,
            remedy="set it, or pass --shard I/N",
        )
    number = _number(environment, array.number) - _number(environment, array.first, 0)
    step = max(1, _number(environment, array.step, 1))
    return Shard(number // step + 1, _number(environment, array.size), array.number)


def told_number(environment: Mapping[str, str]) -> str:
    """Returns the scheduler's variable with this job's number; empty if there is none."""
    array = _array(environment)
    return "" if array is None else array.number


def _array(environment: Mapping[str, str]) -> _Array | None:
    """Returns the array with both numbers, or at least this job's: one array may run inside another."""
    told = [one for one in ARRAYS if one.number in environment]
    return next((one for one in told if one.size in environment), told[0] if told else None)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns a variable's number; the default without the variable."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise UsageError("wrong_type", f"{name} is no number", expected="digits", found=repr(text)[:80])
    return int(text)
