"""The routes of the API, and what each answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from wanserve import hub as hubs
from wanserve import metrics
from wanserve.catalog import Catalog
from wanserve.desk import Desk
from wanserve.device import Device
from wanserve.folders import Folders
from wanserve.intake import Intake
from wanserve.job import ENDED, Job
from wanserve.keys import COOKIE, Client, Keys
from wanserve.metrics import Metrics
from wanserve.refusal import RefusedError, whole
from wanserve.store import Store
from wanserve.uploads import IMAGE_TYPES

TYPES: Final[Mapping[str, str]] = {
    "mp4": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "gif": "image/gif",
    "webp": "image/webp",
}
VARIANTS: Final = ("video", "thumbnail", "last_frame")
STATES: Final = ("queued", "in_progress", *ENDED)

CACHED: Final[Mapping[str, str]] = {"cache-control": "private, max-age=3600, immutable"}
"""Of results, which never change."""

MAX_PAGE: Final = 1 << 20
"""Bytes of a page of jobs that has more than one: prompts may be long."""

POLL_MS: Final = (100, 10_000)
"""The shortest and the longest pause that a client is told between two looks at a job."""


class Routes:
    """The API.

    Args:
        catalog: the models.
        desk: the jobs.
        intake: makes jobs of requests.
        folders: the files.
        store: the stored jobs.
        keys: the clients.
        counted: the metrics.
        devices: the workers.
        schema: the answer of /openapi.json.
    """

    def __init__(
        self,
        catalog: Catalog,
        desk: Desk,
        intake: Intake,
        folders: Folders,
        store: Store,
        keys: Keys,
        counted: Metrics,
        devices: list[Device],
        schema: bytes,
    ) -> None:
        self._catalog, self._desk, self._intake, self._folders = catalog, desk, intake, folders
        self._store, self._keys, self._metrics = store, keys, counted
        self._devices, self._schema = devices, schema
        self._searching = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def routes(self) -> list[Route]:
        """Returns the table of routes."""
        video = "/v1/videos/{id}"
        return [
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.list, methods=["GET"]),
            Route("/v1/videos/sync", self.sync, methods=["POST"]),
            Route("/v1/videos/generations", self.sync, methods=["POST"]),  # TensorRT-LLM's name of it
            Route(video, self.retrieve, methods=["GET"]),
            Route(video, self.change, methods=["PATCH"]),
            Route(video, self.delete, methods=["DELETE"]),
            Route(f"{video}/cancel", self.cancel, methods=["POST"]),
            Route(f"{video}/content", self.content, methods=["GET"]),
            Route(f"{video}/events", self.events, methods=["GET"]),
            Route(f"{video}/media/{{option}}/{{index}}", self.media, methods=["GET"]),
            Route("/v1/events", self.events, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name}", self.model, methods=["GET"]),
            Route("/session", self.sign_in, methods=["POST"]),
            Route("/session", self.sign_out, methods=["DELETE"]),
            Route("/healthz", self.healthy, methods=["GET"]),
            Route("/readyz", self.ready, methods=["GET"]),
            Route("/metrics", self.counted, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Takes a job, and answers at once."""
        job, earlier = await self._intake.accept(request, _client(request))
        return self._shown(job, {"idempotent-replayed": "true"} if earlier else {})

    async def sync(self, request: Request) -> Response:
        """Takes a job, waits for its end, and answers the first video's bytes.

        If the client goes meanwhile, the job is cancelled, but not one with an idempotency key.
        """
        job, _ = await self._intake.accept(request, _client(request))
        gone = asyncio.create_task(_gone(request))
        listener = self._desk.hub.listen(job.owner, job.id)
        try:
            while not self._current(job).over:
                waiting = asyncio.create_task(listener.next(1.0))
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._desk.hub.closed:
                    given = {"Retry-After": "10", "x-video-id": job.id}
                    what = "the server is ending; the video waits for its next start"
                    raise RefusedError(what, 503, code="closing", headers=given)
                if gone.done():
                    if job.idempotency is None:
                        with contextlib.suppress(RefusedError):
                            await self._desk.cancel(self._current(job))
                    return Response(status_code=499)
        finally:
            gone.cancel()
            self._desk.hub.leave(listener)
        return self._first_video(self._current(job))

    def _current(self, job: Job) -> Job:
        """Returns a job as it is now.

        Raises:
            RefusedError: if it was removed.
        """
        return self._desk.find(job.id, None)

    def _first_video(self, job: Job) -> Response:
        if job.error is not None:
            raise RefusedError(job.error.message, 500, code=job.error.code, headers={"x-video-id": job.id})
        if job.status == "cancelled":
            raise RefusedError(
                "the video was cancelled", 409, code="cancelled", headers={"x-video-id": job.id}
            )
        headers = {**CACHED, "x-video-id": job.id}
        return self._file(self._folders.result(job, 0, "video"), TYPES[job.format], headers)

    async def list(self, request: Request) -> Response:
        """Answers a page of the client's jobs."""
        query = request.query_params
        limit, order = whole(query.get("limit", "20"), 1, 100, "limit"), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RefusedError(f"order cannot be {order[:20]!r}; expected asc or desc", param="order")
        states = [state for state in query.get("status", "").split(",") if state]
        if wrong := [state for state in states if state not in STATES]:
            expected = ", ".join(STATES)
            raise RefusedError(f"status cannot be {wrong[0][:20]!r}; expected {expected}", param="status")
        asked = limit + 1, query.get("after"), order == "desc", states, query.get("q", "")[:200]
        async with self._searching[_client(request).name]:  # it may look through the prompts of all jobs
            found = await asyncio.to_thread(self._store.listed, _owner(request), *asked)
        if found is None:
            raise RefusedError("there is no video of the id in after", param="after", code="not_found")
        more, found = len(found) > limit, self._desk.current(found[:limit])
        data, size = list[msgspec.Raw](), 0
        for job in self._desk.board.shown(*found):
            encoded = msgspec.json.encode(job)
            size += len(encoded)
            if data and size > MAX_PAGE:
                break
            data.append(msgspec.Raw(encoded))
        return _json(
            {
                "object": "list",
                "data": data,
                "first_id": found[0].id if data else None,
                "last_id": found[len(data) - 1].id if data else None,
                "has_more": more or len(found) > len(data),
            }
        )

    async def retrieve(self, request: Request) -> Response:
        """Answers a job."""
        return self._shown(self._job(request))

    async def change(self, request: Request) -> Response:
        """Changes a waiting job."""
        job = self._job(request)
        await self._intake.change(request, _client(request), job)
        return self._shown(job)

    async def cancel(self, request: Request) -> Response:
        """Cancels a job."""
        job = self._job(request)
        await self._desk.cancel(job)
        return self._shown(job)

    async def delete(self, request: Request) -> Response:
        """Forgets a job; one that runs is cancelled."""
        job = self._job(request)
        await self._desk.delete(job)
        return _json({"id": job.id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Answers a video, its small picture or its last frame."""
        job, query = self._job(request), request.query_params
        variant = query.get("variant", "video")
        if variant not in VARIANTS:
            expected = ", ".join(VARIANTS)
            raise RefusedError(f"variant cannot be {variant[:20]!r}; expected {expected}", param="variant")
        if job.status != "completed":
            code = "not_ready" if not job.over else job.status
            raise RefusedError(f"there is no content: the video is {job.status}", 409, code=code)
        index = whole(query.get("index", "0"), 0, job.shape["num_videos"] - 1, "index")
        kinds = {"video": TYPES[job.format], "thumbnail": "image/webp", "last_frame": "image/png"}
        return self._file(self._folders.result(job, index, variant), kinds[variant], CACHED)

    async def media(self, request: Request) -> Response:
        """Answers a file that came with a job."""
        job, option = self._job(request), request.path_params["option"]
        files = [one for one in job.media if one.option == option]
        if not files:
            raise RefusedError("there is no such file of this video", 404, code="not_found")
        index = whole(request.path_params["index"], 0, len(files) - 1, "index")
        path = self._folders.upload(job, files[index])
        kind = IMAGE_TYPES.get(path.suffix, "application/octet-stream")
        return self._file(path if path.is_file() else None, kind)

    def _file(self, path: Path | None, kind: str, headers: Mapping[str, str] | None = None) -> Response:
        if path is None:
            raise RefusedError("the file is gone", 404, code="not_found")
        return FileResponse(path, media_type=kind, headers=dict(headers or {}))

    async def events(self, request: Request) -> Response:
        """Answers server-sent events: of one job until it ends, or of all of the client's."""
        if "id" in request.path_params:
            job = self._job(request)
            events = hubs.stream(self._desk.hub, job.owner, job.id, lambda: self._desk.board.shown(job)[0])
        else:
            events = hubs.stream(self._desk.hub, _owner(request))
        headers = {"x-accel-buffering": "no"}  # nginx would hold them back
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def models(self, request: Request) -> Response:
        """Answers the models."""
        data = [model.shown(self._catalog.created) for model in self._catalog.models.values()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Answers a model."""
        model = self._catalog.models.get(request.path_params["name"])
        if model is None:
            raise RefusedError("there is no such model", 404, code="model_not_found")
        return _json(model.shown(self._catalog.created))

    async def sign_in(self, request: Request) -> Response:
        """Gives a browser the cookie of a key."""
        try:
            key = msgspec.json.decode(await request.body(), type=dict[str, str])["key"]
        except (msgspec.DecodeError, KeyError):
            raise RefusedError('expected {"key": "..."}', param="key") from None
        if self._keys and self._keys.find(key) is None:
            raise RefusedError("the key is not valid", 401, code="invalid_api_key", param="key")
        answer = Response(status_code=204)
        if self._keys:
            answer.set_cookie(
                COOKIE, key, httponly=True, samesite="strict", secure=request.url.scheme == "https"
            )
        return answer

    async def sign_out(self, request: Request) -> Response:
        """Takes the cookie away."""
        answer = Response(status_code=204)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    async def healthy(self, request: Request) -> Response:
        """Answers whether the server works."""
        return _json({"status": "ok"}) if self._store.alive else _json({"status": "the store has ended"}, 503)

    async def ready(self, request: Request) -> Response:
        """Answers whether a first step could run, and its job be stored."""
        if self._desk.closing:
            return _json({"status": "ending"}, 503)
        if (lack := self._desk.lack()) is not None:
            return _json({"status": lack}, 503)
        if any(device.ready.is_set() for device in self._devices):
            return _json({"status": "ready"})
        problem = next((device.problem for device in self._devices if device.problem), None)
        return _json({"status": "loading" if problem is None else self._desk.board.told(problem)}, 503)

    async def counted(self, request: Request) -> Response:
        """Answers the metrics."""
        return Response(self._metrics.text(), media_type=metrics.TYPE)

    async def openapi(self, request: Request) -> Response:
        """Answers the description of the API."""
        return Response(self._schema, media_type="application/json")

    def _job(self, request: Request) -> Job:
        return self._desk.find(request.path_params["id"], _owner(request))

    def _shown(self, job: Job, headers: Mapping[str, str] | None = None) -> Response:
        (data,) = self._desk.board.shown(job)
        given = dict(headers or {})
        if not job.over:
            left = data["remaining_seconds"]
            least, most = POLL_MS
            pause = 500 if left is None else min(max(int(left * 500), least), most)
            given["openai-poll-after-ms"] = str(pause)
        return _json(data, headers=given)


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, dict(headers or {}), "application/json")


def _client(request: Request) -> Client:
    client = request.state.client
    assert isinstance(client, Client)  # the guard lets nobody else come here
    return client


def _owner(request: Request) -> str | None:
    """Whose jobs a request may see; without keys everybody's."""
    return _client(request).name or None


async def _gone(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
