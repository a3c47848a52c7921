"""Changes of videos that were accepted: of all that a waiting one has, and of the prompt of a live one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request

from wanserve.field_names import LORA, MEDIA, NO_EFFECT, options_by_name
from wanserve.fields import Body, read_body
from wanserve.forms import RequestBody
from wanserve.intake import Intake, length_of
from wanserve.keys import Client
from wanserve.refusal import RefusedError, told_with, unknown, whole
from wanserve.request_media import paths_of
from wanserve.resolved import shape_of
from wanserve.video import Video

_STAND_FOR = {"seconds": "num_frames", "width": "size", "height": "size", **dict.fromkeys(LORA, "lora")}


class Changes(Intake):
    """An intake that also changes videos."""

    async def steer(self, request: Request, client: Client, video: Video) -> None:
        """Changes the prompt of a live video that runs, from its next chunk on.

        Raises RefusedError for anything but a prompt, and once the video is being ended.
        """
        async with self._folders.incoming() as folder, self._bodies.read(request, client.name) as form:
            body, gone, place = await self._changes(form, video, folder)
        if gone or place is not None or body.spelled.keys() - {"prompt"}:
            what = "only the prompt of a live video that runs can be changed"
            raise RefusedError(what, 409, code="not_waiting")
        if "prompt" not in body.options:
            raise RefusedError(
                "there is no prompt",
                param="prompt",
                code="missing_parameter",
                expected="what the next chunk shows in the field prompt",
            )
        paths = paths_of(body.model, video.media, self._folders.of(video.id))
        await self._resolve(client, body, {**video.options, **body.options}, paths, probe=False)
        if video.status != "in_progress" or video.wants_no_more:
            raise RefusedError("the video has ended, or is being ended", 409, code="already_ended")
        self._queue.lives.of(video).steer(body.options["prompt"])

    async def change(self, request: Request, client: Client, video: Video) -> None:
        """Changes the options, the files or the position of a waiting video.

        What is not given stays; null, or an empty text of a form, takes an option or an input away. Raises
        RefusedError if it does not wait, or cannot be made so.
        """
        self._queue.check_waiting(video)
        self._queue.room.check(length_of(request))
        async with self._folders.incoming() as folder:
            async with self._bodies.read(request, client.name) as form:
                body, gone, place = await self._changes(form, video, folder)
            if body.spelled or gone:
                await self._remake(client, video, body, gone, folder)
        if place is not None:
            self._queue.check_waiting(video)
            await self._queue.move(video, place)

    async def _changes(
        self, form: RequestBody, video: Video, folder: Path
    ) -> tuple[Body, set[str], int | None]:
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
            what, remedy = "the model of a job cannot be changed", "make a new one"
            raise RefusedError(what, param="model", remedy=remedy)
        place = None if position is None else whole(position, 1, 10**9, "position")
        return body, gone, place

    async def _remake(self, client: Client, video: Video, body: Body, gone: set[str], folder: Path) -> None:
        """Gives a waiting video other options, and files that are in a folder."""
        before, own = video.options, self._folders.of(video.id)
        options = {name: value for name, value in before.items() if name not in gone} | body.options
        replaced = {one.option for one in body.media} | gone
        kept = [one for one in video.media if one.option not in replaced]
        paths = paths_of(body.model, kept, own) | paths_of(body.model, body.media, folder)
        with told_with(self._folders.names(own, kept) | self._names(body, folder)):
            generation = await self._resolve(client, body, options, paths)
        body.live_state(self._settings, client.max_live_seconds, generation.fps)
        self._queue.check_waiting(video)
        if video.options is not before:
            what = "the video was changed meanwhile"
            raise RefusedError(what, 409, code="changed", remedy="send it again")
        for one in body.media:
            own.mkdir(exist_ok=True)
            (folder / one.file).replace(self._folders.upload(video, one))
        video.options = {**options, "seed": generation.options["seed"]}
        video.media, video.shape = [*kept, *body.media], shape_of(generation)
        video.format = body.format if "format" in body.spelled else video.format
        if video.live is not None and (body.frames is not None or "num_frames" in gone):
            video.live.frames = body.frames
        self._keep(video, generation)
        await self._queue.change(video)


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
