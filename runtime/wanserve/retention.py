"""Which ended jobs are kept: those that are young enough, and the newest ones that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def outdated(
    ended: Sequence[tuple[str, float, int]], now: float, keep_seconds: float | None, keep_bytes: int | None
) -> Iterator[str]:
    """Yields the ids of the jobs to forget.

    Args:
        ended: id, time of the end and bytes of each ended job, the newest first.
        now: seconds since 1970.
        keep_seconds: how long jobs are kept; None for ever.
        keep_bytes: bytes that are kept; None for no bound.
    """
    total = 0
    for id, time, size in ended:
        total += size
        old = keep_seconds is not None and now - time > keep_seconds
        if old or (keep_bytes is not None and total > keep_bytes):
            yield id
