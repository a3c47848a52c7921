"""Which ended videos are kept: those that are young enough, and the newest ones that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


def outdated(
    ended: Sequence[tuple[str, str, float, int]],
    now: float,
    kept_seconds: Callable[[str], float | None],
    keep_bytes: int | None,
) -> Iterator[str]:
    """Yields the ids of the videos to forget.

    ``ended`` has id, state, time of the end and bytes of each ended video, the newest first; ``now`` is in
    seconds since 1970. ``kept_seconds`` returns how long videos of a state are kept, None for ever;
    ``keep_bytes`` are the bytes that are kept, None for no bound.
    """
    total = 0
    for id, status, time, size in ended:
        total += size
        seconds = kept_seconds(status)
        old = seconds is not None and now - time > seconds
        if old or (keep_bytes is not None and total > keep_bytes):
            yield id
