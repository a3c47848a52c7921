"""The routes of videos and models, and what each answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from wanserve import publisher as hubs
from wanserve.catalog import Catalog, ServedModel
from wanserve.changes import Changes
from wanserve.database import VideoDatabase
from wanserve.field_values import LORAS
from wanserve.folders import Folders
from wanserve.forms import FORM_TYPES
from wanserve.keys import client_of, owner_of
from wanserve.queue import Queue
from wanserve.refusal import RefusedError, absent, failed, one_of, whole, withheld
from wanserve.request_media import IMAGE_TYPES
from wanserve.route import (
    BINARY,
    FORMATS,
    JSON,
    OBJECT,
    TEXT,
    Content,
    RouteParameter,
    gone,
    json_answer,
    route,
    schema_of,
)
from wanserve.video import ENDED, Video

STATES: Final = ("queued", "in_progress", *ENDED)

CACHED: Final[Mapping[str, str]] = {"cache-control": "private, max-age=3600, immutable"}
"""Of results, which never change."""

SMALL: Final = 1 << 20
"""Bytes of a file that is read at once, in memory."""

MAX_PAGE: Final = 1 << 20
"""Bytes of a page of jobs that has more than one: prompts may be long."""

POLL_MS: Final = (100, 10_000)
"""The shortest and the longest pause between two looks at a job, in the header for clients."""

OTHER_BYTES: Final = "application/octet-stream"
WEBP: Final = "image/webp"
PICTURES: Final[Mapping[str, str]] = {"thumbnail": WEBP, "last_frame": "image/png"}
"""The media types of a video's pictures."""

CREATE: Final = Content(schema_of("CreateVideo"), (JSON, *FORM_TYPES))
CHANGE: Final = Content(schema_of("ChangeVideo"), (JSON, *FORM_TYPES))
VIDEO: Final = Content(schema_of("Video"))
VIDEO_FILE: Final = Content(BINARY, tuple(FORMATS.values()))
RESULT_FILE: Final = Content(BINARY, tuple(dict.fromkeys([*FORMATS.values(), *PICTURES.values()])))
PREVIEW_FILE: Final = Content(BINARY, (WEBP,))
MEDIA_FILE: Final = Content(BINARY, (*IMAGE_TYPES.values(), OTHER_BYTES))
EVENTS: Final = Content(TEXT, ("text/event-stream",))
_ID: Final[Mapping[str, Any]] = {"anyOf": [TEXT, {"type": "null"}]}
VIDEOS: Final = Content(
    {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": schema_of("Video")},
            "first_id": _ID,
            "last_id": _ID,
            "has_more": {"type": "boolean"},
        },
    }
)
CREATED: Final = Content({"anyOf": [VIDEO.schema, VIDEOS.schema]})

IDEMPOTENCY_KEY: Final = RouteParameter(
    "Idempotency-Key", TEXT, "The same request under it makes no second job.", place="header"
)
LIMIT: Final = RouteParameter(
    "limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Videos of a page."
)
AFTER: Final = RouteParameter("after", TEXT, "The last id of the page before.")
ORDER: Final = RouteParameter(
    "order", {"enum": ["asc", "desc"], "default": "desc"}, "By the time of acceptance."
)
STATUS: Final = RouteParameter("status", TEXT, "States with commas between them.")
WORDS: Final = RouteParameter("q", TEXT, "Words of the prompt.")
VARIANT: Final = RouteParameter("variant", {"enum": ["video", *PICTURES], "default": "video"}, "Which file.")
NUMBER: Final = RouteParameter(
    "index", {"type": "integer", "minimum": 0, "default": 0}, "Which of several videos."
)


class Routes:
    """The routes of videos and models; ``loaded`` returns the models that workers hold."""

    def __init__(
        self,
        catalog: Catalog,
        queue: Queue,
        intake: Changes,
        folders: Folders,
        store: VideoDatabase,
        loaded: Callable[[], Collection[str]],
    ) -> None:
        self._catalog, self._queue, self._intake = catalog, queue, intake
        self._folders, self._store, self._loaded = folders, store, loaded
        self._searching = defaultdict[str, asyncio.Lock](asyncio.Lock)

    @route("POST", "/v1/videos", IDEMPOTENCY_KEY, body=CREATE, answer=CREATED)
    async def create(self, request: Request) -> Response:
        """Makes a job of a request (multipart, a form or JSON), and answers the job at once.

        With `seeds` it makes a job for each, or none, and answers a list as `GET /v1/videos` does.
        """
        videos, earlier, several = await self._intake.accept(request, client_of(request), several=True)
        headers = {"idempotent-replayed": "true"} if earlier else {}
        if not several:
            return self._shown(videos[0], headers)
        data = self._queue.board.shown(*videos)
        return json_answer(_page(videos, data, more=False), headers=headers)

    @route("GET", "/v1/videos", LIMIT, AFTER, ORDER, STATUS, WORDS, answer=VIDEOS)
    async def videos(self, request: Request) -> Response:
        """Answers a page of your jobs, with fewer than `limit` if they have more than 1 MB."""
        limit, newest_first = LIMIT.whole(request), ORDER.choice(request) == "desc"
        states = [state for state in (STATUS.of(request) or "").split(",") if state]
        for state in states:
            one_of(state, STATES, STATUS.name)
        words = (WORDS.of(request) or "")[:200]
        asked = limit + 1, AFTER.of(request), newest_first, states, words
        async with self._searching[client_of(request).name]:  # it may look through the prompts of all jobs
            found = await asyncio.to_thread(self._store.listed, owner_of(request), *asked)
        if found is None:
            raise RefusedError("there is no video of the id in after", param=AFTER.name, code="not_found")
        more, found = len(found) > limit, self._queue.current(found[:limit])
        data, size = list[msgspec.Raw](), 0
        for video in self._queue.board.shown(*found):
            encoded = msgspec.json.encode(video)
            size += len(encoded)
            if data and size > MAX_PAGE:
                break
            data.append(msgspec.Raw(encoded))
        return json_answer(_page(found, data, more or len(found) > len(data)))

    @route("POST", "/v1/videos/sync", IDEMPOTENCY_KEY, body=CREATE, answer=VIDEO_FILE)
    async def sync(self, request: Request) -> Response:
        """Makes a job, waits for its end, and answers the bytes of its first video.

        If the client goes meanwhile, the job is cancelled, unless it has an `Idempotency-Key`.
        """
        return await self._made(request)

    @route("POST", "/v1/videos/generations", IDEMPOTENCY_KEY, body=CREATE, answer=VIDEO_FILE)
    async def generations(self, request: Request) -> Response:
        """The same as `/v1/videos/sync`, under TensorRT-LLM's name."""
        return await self._made(request)

    async def _made(self, request: Request) -> Response:
        """Answers the first video of a request, once it is made."""
        ((video,), _, _) = await self._intake.accept(request, client_of(request))
        left = asyncio.create_task(gone(request))
        try:
            while not (now := self._current(video)).over:
                if now.status == "queued" and (problem := self._queue.withheld.get(now.model)) is not None:
                    raise withheld(problem, video.id)
                end = self._queue.hub.end(video.id)  # not each event: a step would cost as much again
                await asyncio.wait({end, left}, return_when=asyncio.FIRST_COMPLETED)
                if self._queue.hub.closed:
                    given = {"Retry-After": "10", "x-video-id": video.id}
                    what = "the server is ending; the video waits for its next start"
                    raise RefusedError(what, 503, code="closing", headers=given)
                if left.done():
                    if video.idempotency is None:
                        with contextlib.suppress(RefusedError):
                            await self._queue.cancel(self._current(video))
                    return Response(status_code=499)
        finally:
            left.cancel()
        return await self._first_video(self._current(video))

    def _current(self, video: Video) -> Video:
        """Returns a job as it is now; refuses one that was removed."""
        return self._queue.find(video.id, None)

    async def _first_video(self, video: Video) -> Response:
        if video.error is not None:
            raise failed(video.error, video.id)
        if video.status == "cancelled":
            raise RefusedError(
                "the video was cancelled", 409, code="cancelled", headers={"x-video-id": video.id}
            )
        headers, path = {**CACHED, "x-video-id": video.id}, self._folders.result(video, 0, "video")
        answer = self._file(path, FORMATS[video.format], headers)
        if int(answer.headers["content-length"]) > SMALL:
            return answer
        # A FileResponse goes to another thread to open, read and close.
        return Response(await asyncio.to_thread(path.read_bytes), headers=dict(answer.headers))

    @route("GET", "/v1/videos/{id}", answer=VIDEO)
    async def retrieve(self, request: Request) -> Response:
        """Answers a job."""
        return self._shown(self._video(request))

    @route("PATCH", "/v1/videos/{id}", body=CHANGE, answer=VIDEO)
    async def change(self, request: Request) -> Response:
        """Changes a waiting job: any field, and `position` among your own.

        null, or an empty text of a form, takes a field away. Of a live video that runs `prompt` alone can be
        changed: its next chunk is made by it.
        """
        video = self._video(request)
        steered = video.live is not None and video.status == "in_progress"
        change = self._intake.steer if steered else self._intake.change
        await change(request, client_of(request), video)
        return self._shown(video)

    @route("DELETE", "/v1/videos/{id}", answer=OBJECT)
    async def delete(self, request: Request) -> Response:
        """Forgets a job and its files; one that runs is cancelled."""
        video = self._video(request)
        await self._queue.delete(video)
        return json_answer({"id": video.id, "object": "video.deleted", "deleted": True})

    @route("POST", "/v1/videos/{id}/cancel", answer=VIDEO)
    async def cancel(self, request: Request) -> Response:
        """Cancels a job: while it waits, loads, between two steps, or before decoding.

        A live video that plays ends so, and is completed with what was made.
        """
        video = self._video(request)
        await self._queue.cancel(video)
        return self._shown(video)

    @route("GET", "/v1/videos/{id}/content", VARIANT, NUMBER, answer=RESULT_FILE)
    async def content(self, request: Request) -> Response:
        """Answers a video, its small picture or its last frame. Ranges are answered.

        Of a live video that has ended, also by a failure, it is what was kept.
        """
        video, variant = self._video(request), VARIANT.choice(request)
        if not (video.over and video.plays):
            raise absent("content", video)
        index = NUMBER.whole(request, most=video.shape["num_videos"] - 1)
        kind = PICTURES.get(variant, FORMATS[video.format])
        return self._file(self._folders.result(video, index, variant), kind, CACHED)

    @route("GET", "/v1/videos/{id}/preview", answer=PREVIEW_FILE)
    async def preview(self, request: Request) -> Response:
        """Answers the newest preview of a video that is made.

        It is a WebP that shows a small picture of each latent frame. The video's `preview` is its step.
        Previews are made while somebody listens to the events of the video or asks for this, one in two
        seconds or fewer.
        """
        step, image = self._queue.board.preview(self._video(request))
        return Response(image, headers={"cache-control": "no-store", "x-step": str(step)}, media_type=WEBP)

    @route("GET", "/v1/videos/{id}/events", answer=EVENTS)
    async def events(self, request: Request) -> Response:
        """Sends server-sent events until the job ends.

        They are `queued`, `build`, `loading`, `media`, `text`, `steps` (each step, and each preview),
        `decode`, `encode`, `live` (each chunk), and the state at the end.
        """
        video = self._video(request)
        return _stream(
            hubs.stream(self._queue.hub, video.owner, video.id, lambda: self._queue.board.shown(video)[0])
        )

    @route("GET", "/v1/videos/{id}/media/{option}/{index}", answer=MEDIA_FILE)
    async def media(self, request: Request) -> Response:
        """Answers a file that came with a job."""
        video, option = self._video(request), request.path_params["option"]
        files = [one for one in video.media if one.option == option]
        if not files:
            raise RefusedError("there is no such file of this video", 404, code="not_found")
        index = whole(request.path_params["index"], 0, len(files) - 1, "index")
        path = self._folders.upload(video, files[index])
        return self._file(path, IMAGE_TYPES.get(path.suffix, OTHER_BYTES))

    def _file(self, path: Path, kind: str, headers: Mapping[str, str] | None = None) -> Response:
        try:
            facts = path.stat()
        except FileNotFoundError:
            raise RefusedError("the file is gone", 404, code="not_found") from None
        return FileResponse(path, media_type=kind, headers=dict(headers or {}), stat_result=facts)

    @route("GET", "/v1/events", answer=EVENTS)
    async def all_events(self, request: Request) -> Response:
        """Sends server-sent events of all your jobs.

        `video` has a job that has changed, `deleted` the id of one that is forgotten. `queue` has `id`,
        `position` and `remaining_seconds` of all that wait, when their places have moved, at most five
        times a second.
        """
        return _stream(hubs.stream(self._queue.hub, owner_of(request)))

    @route("GET", "/v1/models", answer=OBJECT)
    async def models(self, request: Request) -> Response:
        """Answers each model with its built shapes, defaults, presets (schedules), inputs and options.

        `build_limit` is the most pixels in all frames of another shape, which is built; null where none is.
        `live` says whether it makes live videos.
        `loaded` says whether a worker holds it; another one is loaded for its next video. `problem` says why
        its jobs wait for the next start of the server.
        """
        data = [self._shown_model(model) for model in self._catalog.models.values()]
        return json_answer({"object": "list", "data": data})

    @route("GET", "/v1/models/{name}", answer=OBJECT)
    async def model(self, request: Request) -> Response:
        """Answers a model."""
        model = self._catalog.models.get(request.path_params["name"])
        if model is None:
            raise RefusedError("there is no such model", 404, code="model_not_found")
        return json_answer(self._shown_model(model))

    @route("GET", "/v1/loras", answer=LORAS)
    async def loras(self, request: Request) -> Response:
        """Answers the LoRAs that a request may choose, with the models that have each.

        `experts` are those that it changes, of a model with two: they may have strengths of their own.
        `defaults` are the options that it changes where a request does not give them.
        """
        found = dict[str, dict[str, Any]]()
        for model in self._catalog.models.values():
            for one in model.shown_loras():
                models = found.setdefault(msgspec.json.encode(one).decode(), {**one, "models": []})["models"]
                models.append(model.name)
        return json_answer({"object": "list", "data": [{**one, "object": "lora"} for one in found.values()]})

    def _shown_model(self, model: ServedModel) -> dict[str, Any]:
        state = {"loaded": model.name in self._loaded(), "problem": self._queue.withheld.get(model.name)}
        return {**model.shown(self._catalog.created), **state}

    def _video(self, request: Request) -> Video:
        return self._queue.find(request.path_params["id"], owner_of(request))

    def _shown(self, video: Video, headers: Mapping[str, str] | None = None) -> Response:
        (shown,) = self._queue.board.shown(video)
        given = dict(headers or {})
        if not video.over:
            left = shown.remaining_seconds
            least, most = POLL_MS
            pause = 500 if left is None else min(max(int(left * 500), least), most)
            given["openai-poll-after-ms"] = str(pause)
        return json_answer(shown, headers=given)


def _page(videos: Sequence[Video], data: Sequence[Any], more: bool) -> dict[str, Any]:
    """A list of jobs, with the first of these as the API answers them."""
    return {
        "object": "list",
        "data": data,
        "first_id": videos[0].id if data else None,
        "last_id": videos[len(data) - 1].id if data else None,
        "has_more": more,
    }


def _stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"x-accel-buffering": "no"}  # nginx would hold them back
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
