"""Jobs in a line: each begins when the one before it has made its steps, so that the device does not wait."""

from __future__ import annotations

__all__ = ["AT_ONCE", "Passed", "in_line", "passing", "run_all"]

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from wanrun.generation.pipeline import Pipeline
    from wanrun.generation.result import Result
    from wanrun.opened.cancel import CancelToken
    from wanrun.request.generation import Generation

T = TypeVar("T")

Passed = Callable[[], object]
"""Called by a job that has made its steps: the next one may begin. A job that ends has passed too."""

AT_ONCE: Final = 2
"""One that decodes and writes its videos, and one that reads, encodes its prompt and makes its steps."""


def in_line(jobs: Iterable[Callable[[Passed], T]]) -> Iterator[T]:
    """Runs each job on a thread, at most ``AT_ONCE``, and yields what they return in their order.

    A job is taken from ``jobs`` once the one before it has passed, and what has ended is yielded before that.
    If the caller stops, the jobs that run are waited for.

    Raises:
        Exception: what a job raises, in its place.
    """
    running = deque[Future[T]]()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="wanrun job") as threads:
        for job in jobs:
            passed = threading.Event()
            running.append(threads.submit(_ran, job, passed))
            passed.wait()
            while running and (running[0].done() or len(running) == AT_ONCE):
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def run_all(
    pipeline: Pipeline, generations: Iterable[Generation], *, cancel: CancelToken | None = None
) -> Iterator[Result]:
    """Makes the videos of resolved requests; each begins while those of the one before are decoded.

    Args:
        pipeline: what makes them.
        generations: what is made, such as of several seeds; each is taken once the one before has made its
            steps.
        cancel: ends all of them.

    Returns:
        The results, in order. While the caller has one, the next one is made, and no other is begun.

    Raises:
        WanError: as of ``Pipeline.run``, in the place of the result.
    """

    def run(generation: Generation, passed: Passed) -> Result:
        return pipeline.run(generation, on_step=passing(passed), cancel=cancel)

    return in_line(partial(run, generation) for generation in generations)


def passing(passed: Passed) -> Callable[[int, int], None]:
    """Returns an ``on_step`` of ``Pipeline.run`` that calls ``passed`` once all steps are made."""

    def on_step(done: int, total: int) -> None:
        if done == total:
            passed()

    return on_step


def _ran(job: Callable[[Passed], T], passed: threading.Event) -> T:
    try:
        return job(passed.set)
    finally:
        passed.set()
