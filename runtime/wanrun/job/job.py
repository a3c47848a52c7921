"""A job, and the one function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.errors import WanError
from wanrun.generation.video_parts import remove_spool
from wanrun.job.line import Passed, passing
from wanrun.job.outcome import Outcome, plain
from wanrun.job.outputs import Output
from wanrun.job.progress import Progress
from wanrun.job.writing import Writing
from wanrun.request.generation import Generation
from wanrun.text.encoder import Warn, silent

if TYPE_CHECKING:
    import numpy as np

    from wanrun.generation.pipeline import Pipeline
    from wanrun.generation.step import OnStep, Step
    from wanrun.media.inputs import Inputs
    from wanrun.opened.cancel import CancelToken


@dataclass(frozen=True)
class Job:
    """A resolved request with the files to write.

    Attributes:
        id: its name, for events and the outcome.
        generation: the resolved request.
        outputs: the files that are written, in order; those that exist already are left out, and a process
            that writes nothing has none.
    """

    id: str
    generation: Generation
    outputs: tuple[Output, ...] = ()


_NO_FACTS: Mapping[str, Any] = MappingProxyType({})


def _no_more(output: Output, metadata: Mapping[str, Any]) -> None:
    pass


def _not_waited_for() -> None:
    pass


def run_job(
    pipeline: Pipeline,
    job: Job,
    progress: Progress | None = None,
    *,
    inputs: Inputs | None = None,
    latents: np.ndarray | None = None,
    facts: Mapping[str, Any] = _NO_FACTS,
    cancel: CancelToken | None = None,
    warn: Warn = silent,
    overwrite: bool = False,
    written: Callable[[Output, Mapping[str, Any]], object] = _no_more,
    passed: Passed = _not_waited_for,
    look: Callable[[int, Step], object] | None = None,
    spool: Path | None = None,
    last: bool = False,
) -> Outcome:
    """Makes the videos of a job, writes its outputs, and returns how it ended.

    Args:
        pipeline: the artifact that the job was resolved for.
        job: the job.
        progress: what tells of it and records its times; None for nobody.
        inputs, latents, cancel, warn: as of ``Pipeline.run``.
        facts: entries of the metadata besides the generation's own, such as the name of the latents' file.
        overwrite: whether existing videos are replaced.
        written: gets each output once it is written, with the metadata of the videos, before the next one is.
        passed: called once all steps are made: see ``wanrun.job.line``.
        look: gets the number of steps done and the ``Step``, after the progress has been told of it.
        spool: folder of the frames of clips or windows while they are made, from which the same job goes on
            after an end, as of ``Pipeline.run``; removed once all outputs are written. None for memory.
        last: whether no other job follows, as of ``Pipeline.run``.

    Returns:
        The outcome, which has any WanError. Other errors are raised.
    """
    progress, sizes = Progress(job.id) if progress is None else progress, dict[str, int]()
    try:
        with Writing(job.outputs, facts, overwrite) as writing:
            result = pipeline.run(
                job.generation,
                inputs=inputs,
                latents=latents,
                on_step=_telling(progress, look, passed),
                on_frames=writing,
                timings=progress.timings,
                warn=warn,
                cancel=cancel,
                spool=spool,
                overwrite=overwrite,
                last=last,
            )
            metadata = {**result.options, **facts}
            ends = writing.ends()
            shown = result if ends is None else replace(result, frames=ends)
            with progress.timings.phase("encode_video") if job.outputs else nullcontext():
                for output in job.outputs:
                    if not writing.finish(output):
                        output.write(shown, metadata, overwrite)
                    sizes[str(output.path)] = output.nbytes
                    written(output, metadata)
        if spool is not None and job.generation.in_parts:  # else the parts there are another video's
            remove_spool(spool)
    except WanError as error:
        return progress.outcome(error)
    finally:
        progress.stop()
    return progress.outcome(metadata=plain(metadata), sizes=sizes, warnings=list(result.warnings))


def _telling(progress: Progress, look: Callable[[int, Step], object] | None, passed: Passed) -> OnStep:
    """Returns the function that a pipeline calls after each step."""
    pass_on = passing(passed)

    def told(done: int, total: int) -> None:
        progress.step(done, total)
        pass_on(done, total)

    if look is None:
        return told

    def on_step(done: int, total: int, step: Step) -> None:
        told(done, total)
        look(done, step)

    return on_step
