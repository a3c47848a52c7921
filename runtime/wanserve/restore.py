"""What the last server has left: its videos wait again, and files of no video are removed."""

from __future__ import annotations

import asyncio
import sqlite3
import time

from wanserve import store as stored
from wanserve.folders import Folders
from wanserve.log import LOG
from wanserve.store import Store
from wanserve.video import Failure, Video


async def restored(store: Store, folders: Folders) -> list[Video]:
    """Returns the videos that wait, the next one first: what a worker had waits again.

    A live video that somebody may have seen a part of does not: it has failed, or has ended if no more was
    wanted, and what was made of it plays.
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


async def _joined(video: Video, store: Store, folders: Folders) -> None:
    """Makes one file of what is left of a live video."""
    if video.live is not None and video.over:
        files = folders.live(video)
        await asyncio.to_thread(files.join, video.live.made)
        await asyncio.to_thread(files.clear)
        video.bytes = await asyncio.to_thread(folders.size, video.id)
        await store.change(lambda connection: stored.put(connection, video))
