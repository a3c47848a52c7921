"""The videos that a server keeps: at its start those of the last server, later the ended ones that are young
enough, and the newest ones that fit.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence

from wanserve import database as stored
from wanserve.database import VideoDatabase
from wanserve.folders import Folders
from wanserve.log import LOG
from wanserve.video import Failure, Video


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
    for id, status, end, size in ended:
        total += size
        seconds = kept_seconds(status)
        old = seconds is not None and now - end > seconds
        if old or (keep_bytes is not None and total > keep_bytes):
            yield id


async def restored(store: VideoDatabase, folders: Folders) -> list[Video]:
    """Returns the videos that wait, the next one first: what a worker had waits again.

    A live video whose first part a client may have seen does not: it has failed, or has ended if no more was
    wanted, and its fragments play.
    """

    def again(connection: sqlite3.Connection) -> tuple[set[str], set[str]]:
        for video in stored.videos_with(connection, "in_progress"):
            if (live := video.live) is not None and (pieces := folders.live(video).pieces):
                live.dropped, live.made = pieces[0].first, pieces[-1].first + pieces[-1].frames
            if video.plays:
                video.status, video.ended = "completed", time.time()
                if not video.wants_no_more:
                    video.error = Failure("worker_died", "the server has ended while the video was made")
                    video.status = "failed"
            else:
                video.status = "cancelled" if video.unwanted else "queued"
                video.ended = time.time() if video.unwanted else None
                video.attempts -= 1  # the server has ended, and not by the video's fault
            stored.put(connection, video)
        known = {id for (id,) in connection.execute("SELECT id FROM videos")}
        return known, set(stored.removed(connection))

    unknown = await asyncio.to_thread(folders.clean, *await store.change(again))
    await store.change(stored.forget_removed)
    if unknown:
        LOG.warning("%d folders in %s are of no known job, and stay", len(unknown), unknown[0].parent)
    for video in filter(None, map(store.find, folders.with_fragments())):
        try:
            await _joined(video, store, folders)
        except OSError as error:  # its fragments stay for the next start
            LOG.warning("what was made of %s is no file yet: %s", video.id, error)
    return store.waiting()


async def _joined(video: Video, store: VideoDatabase, folders: Folders) -> None:
    """Makes one file of a live video's fragments."""
    if video.live is not None and video.over:
        files = folders.live(video)
        await asyncio.to_thread(files.join, video.live.made)
        await asyncio.to_thread(files.clear)
        video.bytes = await asyncio.to_thread(folders.size, video.id)
        await store.change(lambda connection: stored.put(connection, video))
