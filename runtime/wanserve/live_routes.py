"""The route of live videos, which answers fragments as they are made."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from wanserve.folders import Folders
from wanserve.keys import owner_of
from wanserve.live_jobs import LiveJob, LiveReader
from wanserve.protocol import TRANSPORT
from wanserve.queue import Queue
from wanserve.refusal import RefusedError, absent, closing, failed, withheld
from wanserve.route import BINARY, FORMATS, Content, RouteParameter, gone, route
from wanserve.video import Video

PACE: Final = RouteParameter(
    "pace",
    {"enum": ["made", "played"], "default": "made"},
    "As it is made; or as it plays, from the newest fragment on.",
)
LIVE_FILE: Final = Content(BINARY, (FORMATS["mp4"],))
HEADERS: Final[Mapping[str, str]] = {"x-accel-buffering": "no"}

SEND_BYTES: Final = 128 << 10
"""Of a live video that the system holds for a reader: what it holds counts as read."""


class LiveRoutes:
    """The routes of live videos."""

    def __init__(self, queue: Queue, folders: Folders) -> None:
        self._queue, self._folders = queue, folders

    @route("GET", "/v1/videos/{id}/live", PACE, answer=LIVE_FILE)
    async def live(self, request: Request) -> Response:
        """Answers a live video while it is made, as MP4 in fragments; waits for its first one.

        It begins with the video, or with the newest fragment if the first one is not kept any more. Many may
        read. A worker is two chunks ahead of the fastest reader, and waits for it. Who is so slow that a
        fragment is not kept any more goes on with the newest. Of a video that has ended it is what was kept.
        """
        video = self._queue.find(request.path_params["id"], owner_of(request))
        if video.live is None:
            what, remedy = "the video is not live", "ask for one with live: true"
            raise RefusedError(what, 409, code="not_live", remedy=remedy)
        plays = PACE.choice(request) == "played"
        if video.over:
            return self._ended(video)
        job = self._queue.lives.of(video)
        reader = job.join(plays)
        try:
            begun = await self._begun(request, job)
        except BaseException:
            job.leave(reader)
            raise
        if not begun:
            job.leave(reader)
            return self._ended(self._queue.find(video.id, None))
        answer: dict[str, Any] = {"media_type": video.live.media_type, "headers": dict(HEADERS)}
        if request.method == "HEAD":
            job.leave(reader)
            return StreamingResponse((), **answer)
        _hold_little(request)
        return _Reading(job, reader, **answer)

    async def _begun(self, request: Request, job: LiveJob) -> bool:
        """Waits for the first fragment; returns False if none comes, or the client has gone."""
        if job.video.model in self._queue.withheld:
            return job.made > 0
        waits: list[asyncio.Future[Any]]
        waits = [asyncio.ensure_future(job.begun()), asyncio.ensure_future(gone(request))]
        try:
            end = self._queue.hub.end(job.video.id)
            await asyncio.wait({*waits, end}, return_when=asyncio.FIRST_COMPLETED)
            return job.made > 0 and not waits[1].done()
        finally:
            for one in waits:
                one.cancel()

    def _ended(self, video: Video) -> Response:
        """Answers what is kept of a live video; raises RefusedError if nothing was made."""
        if not video.over and (problem := self._queue.withheld.get(video.model)) is not None:
            raise withheld(problem, video.id)
        if not video.over:  # or the client has gone
            raise closing()
        if video.error is not None and not video.plays:
            raise failed(video.error, video.id)
        path = self._folders.result(video, 0, "video")
        if not (video.plays and path.exists()):
            raise absent("content", video)
        assert video.live is not None
        return FileResponse(path, media_type=video.live.media_type or FORMATS["mp4"])


class _Reading(StreamingResponse):
    """What a reader is answered, who leaves with it."""

    def __init__(self, job: LiveJob, reader: LiveReader, **given: Any) -> None:
        super().__init__(job.read(reader), **given)
        self._job, self._reader = job, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.leave(self._reader)


def _hold_little(request: Request) -> None:
    """Lets the system hold little for a reader: else one that does not read would seem to for megabytes."""
    transport = request.scope.get("state", {}).get(TRANSPORT)
    if transport is not None and (open := transport.get_extra_info("socket")) is not None:
        with suppress(OSError):
            open.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
