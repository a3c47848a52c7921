"""Fetches many files of a partial copy beforehand, several at a time, and checks those that are there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

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

    def one(name: str) -> None:
        copy.discard_damaged(name)
        copy.fetch(name, advance)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(one, name) for name in names]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for name in names:
        if not (copy.folder / name).is_file():
            raise ArtifactError(f"{name} of {copy.address.text} was removed meanwhile", remedy="try again")
