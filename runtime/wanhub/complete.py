"""Fetches many files of a partial copy beforehand, several at a time, and checks those that are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import wanrun
from wanhub.copy import PartialCopy
from wanrun.errors import ArtifactError

THREADS: Final = 16
"""Requests at a time: most files are small, and each waits for the network."""


def complete(copy: PartialCopy, names: Collection[str], advance: Callable[[int], None]) -> None:
    """Fetches files that are missing or damaged.

    Args:
        copy: the copy.
        names: paths in the artifact, which its manifest lists.
        advance: gets numbers of bytes as they come, from any thread.

    Raises:
        ArtifactError, UsageError: as ``PartialCopy.fetch``; what else came stays.
    """

    with ThreadPoolExecutor(THREADS, thread_name_prefix="fetch") as pool:
        groups = wanrun.groups(copy.named[name] for name in names)
        _finish(pool, (pool.submit(copy.discard_damaged, group) for group in groups))
        _finish(pool, (pool.submit(copy.fetch, name, advance) for name in names))
    for name in names:
        if not (copy.folder / name).is_file():
            raise ArtifactError(f"{name} of {copy.address.text} was removed meanwhile", remedy="try again")


def _finish(pool: ThreadPoolExecutor, submitted: Iterable[Future[Any]]) -> None:
    """Waits for all, and raises the first error; then what has not begun is left out."""
    futures = list(submitted)
    try:
        for future in futures:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
