"""From a request to a video: the fields are read, files stored, and everything is checked before it waits.

Then a ``Device`` takes the video from the queue in its turn, and sends its worker what ``make`` returns. The
worker runs that by ``wanrun.run_job``. Its messages go to ``Queue``, and from there to all who listen.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs
from starlette.requests import Request

import wanrun
from wanrun import CancelToken
from wanrun.errors import ArtifactError, CancelledError, WanError
from wanserve.bodies import Bodies
from wanserve.catalog import Catalog
from wanserve.fields import Body, read_body
from wanserve.folders import Folders
from wanserve.keys import Client
from wanserve.log import DEBUG, tell
from wanserve.messages import Going, Make
from wanserve.queue import Queue
from wanserve.refusal import RefusedError, closing, refused, told_with
from wanserve.request_media import paths_of
from wanserve.resolved import shape_of
from wanserve.settings import Settings
from wanserve.video import Video

if TYPE_CHECKING:
    from wanrun import Generation

MAX_KEY = 255
"""Characters of an idempotency key."""

PROBES = 3
"""Requests whose images and videos are probed at a time, one of each client: a process of up to 1.5 GB."""

_SHAPE = ("size", "num_frames", "num_videos", "guidance_scale", "profile")


class Accepted(NamedTuple):
    """The videos of a request, whether its idempotency key had them already, and whether it had seeds."""

    videos: list[Video]
    earlier: bool
    several: bool


class Intake:
    """Makes videos of requests, which wait in the queue, and jobs of videos for the workers."""

    def __init__(self, settings: Settings, catalog: Catalog, queue: Queue, folders: Folders) -> None:
        self._settings, self._catalog, self._queue, self._folders = settings, catalog, queue, folders
        self._probes = asyncio.Semaphore(PROBES)
        self._ending = CancelToken()
        self._own_check = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._own_probe = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._bodies = Bodies(folders)

    async def accept(self, request: Request, client: Client, several: bool = False) -> Accepted:
        """Makes the videos of a request: one, or if ``several`` one for each of its seeds.

        Raises RefusedError for a request that cannot be served; then none of its videos is made.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
            expected = f"a text of at most {MAX_KEY} characters"
            raise RefusedError("the Idempotency-Key cannot be used", expected=expected)
        self._queue.room.check(length_of(request))
        async with self._folders.incoming() as folder:
            async with self._bodies.read(request, client.name) as form:
                body = await asyncio.to_thread(read_body, form, self._catalog, folder)
            if not several and (body.live or body.seeds is not None):
                name, what = ("live", "is") if body.live else ("seeds", "are")
                raise RefusedError(f"{name} {what} for v1/videos; here one video is answered", param=name)
            fingerprint, media = body.fingerprint(), paths_of(body.model, body.media, folder)
            with told_with(self._names(body, folder)):
                each = [{}] if body.seeds is None else [{"seed": seed} for seed in body.seeds]
                made = [
                    await self._resolve(client, body, {**body.options, **seed}, media, probe=seed is each[0])
                    for seed in each
                ]
            videos = [
                Video(
                    owner=client.name,
                    model=body.model.name,
                    options={**body.options, "seed": generation.options["seed"]},
                    media=body.media,
                    format=body.format,
                    shape=shape_of(generation),
                    live=body.live_state(self._settings, client.max_live_seconds, generation.fps),
                    created=time.time(),
                    idempotency=key if key is None or number == 0 else f"{key}\n{number}",
                    fingerprint=fingerprint,
                )
                for number, generation in enumerate(made)
            ]
            kept = await self._put(client, folder, videos, made)
        earlier = not any(one is video for one, video in zip(kept, videos, strict=True))
        return Accepted(kept, earlier, body.seeds is not None)

    async def _put(
        self, client: Client, folder: Path, videos: list[Video], made: list[Generation]
    ) -> list[Video]:
        """Queues all of these videos, or none; returns them, or those that their key has."""
        given = [
            (video, partial(self._settle, folder, video, generation, video is not videos[-1]))
            for video, generation in zip(videos, made, strict=True)
        ]
        kept = await self._queue.accept(*given, owner_limit=client.max_waiting)
        for video in (one for one, found in zip(videos, kept, strict=True) if one is found):
            tell("accepted", id=video.id, model=video.model, client=video.owner or None, **video.shape)
            tell("options", DEBUG, id=video.id, **video.options)
        return kept

    def _settle(self, folder: Path, video: Video, generation: Generation, more: bool) -> None:
        """Puts the files of a request at a video, and keeps what it was resolved to."""
        self._folders.keep(folder, video.id, more)
        self._keep(video, generation)

    def _keep(self, video: Video, generation: Generation) -> None:
        """Keeps what a video was resolved to, with its files where they stay."""
        if generation.media is not None:
            files = paths_of(self._catalog.models[video.model], video.media, self._folders.of(video.id))
            several = {name: tuple(paths) for name, paths in files.items() if isinstance(paths, list)}
            generation = replace(generation, media=structs.replace(generation.media, **files | several))
        self._queue.resolved.keep(video.id, generation)

    async def _resolve(
        self,
        client: Client,
        body: Body,
        options: dict[str, Any],
        paths: dict[str, Any],
        probe: bool = True,
    ) -> Generation:
        """Checks a request, and with `probe` its files; returns what it makes."""
        try:
            # In a thread, one of each client: ten thousand steps take a while.
            async with self._own_check[client.name]:
                generation = await asyncio.to_thread(body.model.resolve, {**options, **paths}, body.spell)
            if paths and probe:
                async with self._own_probe[client.name], self._probes:
                    await asyncio.to_thread(generation.probe_media, cancel=self._ending)
        except CancelledError:
            raise closing() from None
        except ArtifactError as error:
            asked = [name for name in _SHAPE if name in body.options]
            raise refused(error, body.spell, asked) from None
        except WanError as error:
            raise refused(error, body.spell, builds=body.model.most is not None) from None
        return generation

    def close(self) -> None:
        """Ends what looks at images and videos, from any thread; the requests are refused."""
        self._ending.cancel()

    def _names(self, body: Body, folder: Path) -> dict[str, str]:
        """Returns the names that stand for the server's paths in messages."""
        return {str(body.model.artifact): body.model.name, **self._folders.names(folder, body.media)}

    def asked(self, video: Video) -> dict[str, Any]:
        """Returns the options of a video by Python name, with the paths of its files.

        Raises KeyError if its model is no longer served.
        """
        paths = paths_of(self._catalog.models[video.model], video.media, self._folders.of(video.id))
        return {**video.options, **paths}

    def make(self, video: Video) -> Make:
        """Returns the message that has a worker make a video, whose folder for results is empty then.

        Raises KeyError if its model is no longer served, WanError or RefusedError if it was accepted before
        the last start and the artifact is another now, and OSError if there is no room for the folder.
        """
        model = self._catalog.models[video.model]
        generation = self._queue.resolved.find(video.id)
        if generation is None:
            generation = model.resolve(self.asked(video), str)
        self._folders.out(video)
        job = wanrun.pack(wanrun.Job(video.id, generation, self._folders.outputs(video)))
        live = video.live
        going = None if live is None else Going(live.frames, live.seconds)
        return Make(video.model, job, going)


def length_of(request: Request) -> int:
    """The bytes of a request's body, by its header."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdigit() else 0  # the guard has looked at it
