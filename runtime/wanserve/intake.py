"""From a request to a video: the fields are read, files stored, and everything is checked before it waits."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs
from starlette.requests import Request

import wanrun
from wanrun import CancelToken
from wanrun.errors import ArtifactError, CancelledError, WanError
from wanserve.bodies import Bodies
from wanserve.catalog import Catalog, Model
from wanserve.fields import Body, read_body
from wanserve.folders import Folders
from wanserve.forms import Form
from wanserve.keys import Client
from wanserve.log import DEBUG, tell
from wanserve.messages import Going, Make
from wanserve.names import LORA, MEDIA, NO_EFFECT, options_by_name
from wanserve.queue import Queue
from wanserve.refusal import RefusedError, closing, refused, told_with, unknown, whole
from wanserve.settings import Settings
from wanserve.video import Live, Upload, Video

if TYPE_CHECKING:
    from wanrun import Generation

MAX_KEY = 255
"""Characters of an idempotency key."""

PROBES = 3
"""Requests whose images and videos are probed at a time, one of each client: a process of up to 1.5 GB."""

_STAND_FOR = {"seconds": "num_frames", "width": "size", "height": "size", **dict.fromkeys(LORA, "lora")}
_SHAPE = ("size", "num_frames", "num_videos", "guidance_scale", "profile")


class Accepted(NamedTuple):
    """The videos of a request, whether its idempotency key had them already, and whether it had seeds."""

    videos: list[Video]
    earlier: bool
    several: bool


class Intake:
    """Makes videos of requests.

    Args:
        settings: the limits.
        catalog: the models.
        queue: where videos wait.
        folders: where files are stored.
    """

    def __init__(self, settings: Settings, catalog: Catalog, queue: Queue, folders: Folders) -> None:
        self._settings, self._catalog, self._queue, self._folders = settings, catalog, queue, folders
        self._probes = asyncio.Semaphore(PROBES)
        self._ending = CancelToken()
        self._own_check = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._own_probe = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._bodies = Bodies(folders)

    async def accept(self, request: Request, client: Client, several: bool = False) -> Accepted:
        """Makes the videos of a request: one, or one for each of its seeds.

        Args:
            request: the request.
            client: whose it is.
            several: whether it may have seeds.

        Raises:
            RefusedError: for a request that cannot be served; then none of its videos is made.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
            raise RefusedError(f"the Idempotency-Key is no text of at most {MAX_KEY} characters")
        self._queue.room.check(_length(request))
        async with self._folders.incoming() as folder:
            async with self._bodies.read(request, client.name) as form:
                body = await asyncio.to_thread(read_body, form, self._catalog, folder)
            if not several and (body.live or body.seeds is not None):
                name, what = ("live", "is") if body.live else ("seeds", "are")
                raise RefusedError(f"{name} {what} for v1/videos; here one video is answered", param=name)
            fingerprint, media = _fingerprint(body), _paths(body.model, body.media, folder)
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
                    shape=_shape(generation),
                    live=self._live(body, client, generation.fps),
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
        """Lets all of these videos wait, or none; returns them, or those that their key has."""
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

    def _live(self, body: Body, client: Client, fps: float) -> Live | None:
        """Returns what makes the video of a request live; raises RefusedError for one that is too long."""
        if not body.live:
            return None
        most = self._settings.max_live_seconds
        if client.max_live_seconds is not None:
            most = min(most, float(client.max_live_seconds))
        if body.frames is not None and body.frames - 1 > most * fps:  # one more ends the last second
            name = body.spell("num_frames")
            what = f"a live video has at most {most:g} seconds, {int(most * fps)} frames"
            raise RefusedError(f"{what}; found {body.frames} frames; ask for fewer", param=name)
        return Live(frames=body.frames, seconds=most, bytes=self._settings.live_bytes)

    async def steer(self, request: Request, client: Client, video: Video) -> None:
        """Changes the prompt of a live video that runs, from its next chunk on.

        Raises:
            RefusedError: for anything but a prompt, and once the video is being ended.
        """
        async with self._folders.incoming() as folder, self._bodies.read(request, client.name) as form:
            body, gone, place = await self._changes(form, video, folder)
        if gone or place is not None or body.spelled.keys() - {"prompt"}:
            what = "of a live video that runs the prompt alone can be changed"
            raise RefusedError(what, 409, code="not_waiting")
        if "prompt" not in body.options:
            what = "there is no prompt; expected what the next chunk shows in the field prompt"
            raise RefusedError(what, param="prompt")
        paths = _paths(body.model, video.media, self._folders.of(video.id))
        await self._resolve(client, body, {**video.options, **body.options}, paths, probe=False)
        if video.status != "in_progress" or video.wants_no_more:
            raise RefusedError("the video has ended, or is being ended", 409, code="already_ended")
        self._queue.lives.of(video).steer(body.options["prompt"])

    async def change(self, request: Request, client: Client, video: Video) -> None:
        """Changes the options, the files or the position of a waiting video.

        What is not given stays; null, or an empty text of a form, takes an option or an input away.

        Raises:
            RefusedError: if it does not wait, or cannot be made so.
        """
        self._queue.check_waiting(video)
        self._queue.room.check(_length(request))
        async with self._folders.incoming() as folder:
            async with self._bodies.read(request, client.name) as form:
                body, gone, place = await self._changes(form, video, folder)
            if body.spelled or gone:
                await self._remake(client, video, body, gone, folder)
        if place is not None:
            self._queue.check_waiting(video)
            await self._queue.move(video, place)

    async def _changes(self, form: Form, video: Video, folder: Path) -> tuple[Body, set[str], int | None]:
        """Returns what a form changes of a video: what it gives, what it takes away, and the position."""
        position = form.fields.pop("position", None)
        empty = {name for name, value in form.fields.items() if value in (None, "")} - {"prompt"}
        gone = {option for name in empty for option in _named(name, video)}
        form.fields = {name: value for name, value in form.fields.items() if name not in empty}
        given = (form, self._catalog, folder, video.model, video.live is not None)
        body = await asyncio.to_thread(read_body, *given)
        if body.live != (video.live is not None):
            raise RefusedError("whether a job is live cannot be changed; make a new one", param="live")
        if body.seeds is not None:
            raise RefusedError("seeds make other videos, and a job has one; change its seed", param="seeds")
        if body.model.name != video.model:
            raise RefusedError("the model of a job cannot be changed; make a new one", param="model")
        place = None if position is None else whole(position, 1, 10**9, "position")
        return body, gone, place

    async def _remake(self, client: Client, video: Video, body: Body, gone: set[str], folder: Path) -> None:
        """Gives a waiting video other options, and files that are in a folder."""
        before, own = video.options, self._folders.of(video.id)
        options = {name: value for name, value in before.items() if name not in gone} | body.options
        replaced = {one.option for one in body.media} | gone
        kept = [one for one in video.media if one.option not in replaced]
        paths = _paths(body.model, kept, own) | _paths(body.model, body.media, folder)
        with told_with(self._folders.names(own, kept) | self._names(body, folder)):
            generation = await self._resolve(client, body, options, paths)
        self._live(body, client, generation.fps)
        self._queue.check_waiting(video)
        if video.options is not before:
            raise RefusedError("the video was changed meanwhile; send it again", 409, code="changed")
        for one in body.media:
            own.mkdir(exist_ok=True)
            (folder / one.file).replace(self._folders.upload(video, one))
        video.options = {**options, "seed": generation.options["seed"]}
        video.media, video.shape = [*kept, *body.media], _shape(generation)
        video.format = body.format if "format" in body.spelled else video.format
        if video.live is not None and (body.frames is not None or "num_frames" in gone):
            video.live.frames = body.frames
        self._keep(video, generation)
        await self._queue.change(video)

    def _keep(self, video: Video, generation: Generation) -> None:
        """Keeps what a video was resolved to, with its files where they stay."""
        if generation.media is not None:
            files = _paths(self._catalog.models[video.model], video.media, self._folders.of(video.id))
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

        Raises:
            KeyError: if its model is no longer served.
        """
        paths = _paths(self._catalog.models[video.model], video.media, self._folders.of(video.id))
        return {**video.options, **paths}

    def make(self, video: Video) -> Make:
        """Returns what tells a worker to make a video, whose folder for results is empty then.

        Raises:
            KeyError: if its model is no longer served.
            WanError, RefusedError: if it was accepted before the last start, and the artifact is another now.
            OSError: if there is no room for the folder.
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


def _length(request: Request) -> int:
    """The bytes of a request's body that its header tells."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdigit() else 0  # the guard has looked at it


def _named(name: str, video: Video) -> set[str]:
    """Returns the options, or the inputs, that a field without a value takes away from a video."""
    if name in MEDIA:
        return {MEDIA[name]} if MEDIA[name] else {one.option for one in video.media}
    if name in _STAND_FOR:
        return {_STAND_FOR[name]}
    option = options_by_name().get(name)
    if option is None and name not in NO_EFFECT:
        raise unknown(name)
    return set() if option is None else {option}


def _paths(model: Model, media: list[Upload], folder: Path) -> dict[str, Any]:
    """Returns the paths of stored files by option; a list where an option takes several."""
    paths = dict[str, Any]()
    for one in media:
        path = str(folder / one.file)
        if model.options[one.option].many:
            paths.setdefault(one.option, []).append(path)
        else:
            paths[one.option] = path
    return paths


def _shape(generation: Generation) -> dict[str, Any]:
    """Returns the facts of a video that are known before it runs."""
    profile, counts = generation.profile, generation.counts()
    return {
        "profile": profile.name,
        "size": f"{profile.width}x{profile.height}",
        "num_frames": counts.frames,
        "num_videos": counts.videos,
        "fps": generation.fps,
        "num_steps": counts.told_steps,
        "windows": counts.windows,
        "guided": counts.rounds * (counts.guided + counts.skipping),
        "other_frames": generation.other_frames,
    }


def _fingerprint(body: Body) -> str:
    """Returns a digest that is equal for equal requests."""
    facts: list[Any] = [
        *((["live", body.frames],) if body.live else ()),
        body.model.name,
        body.options,
        body.format,
        [(one.option, one.digest) for one in body.media],
    ]
    if body.seeds is not None:
        facts.append(body.seeds)
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
