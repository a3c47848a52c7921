"""The routes about the server itself: signing in, its health, its metrics, and its description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from wanserve import metrics
from wanserve.database import VideoDatabase
from wanserve.device import Device
from wanserve.keys import COOKIE, Keys
from wanserve.metrics import Metrics
from wanserve.queue import Queue
from wanserve.refusal import RefusedError
from wanserve.route import JSON, OBJECT, TEXT, Content, json_answer, route

KEY: Final = Content({"type": "object", "properties": {"key": TEXT}, "required": ["key"]})
STATE: Final = Content({"type": "object", "properties": {"status": TEXT}})


class ServerRoutes:
    """The routes about the server itself; ``document`` is the OpenAPI document, as JSON."""

    def __init__(
        self,
        queue: Queue,
        store: VideoDatabase,
        keys: Keys,
        counted: Metrics,
        devices: Sequence[Device],
        document: bytes,
    ) -> None:
        self._queue, self._store, self._keys = queue, store, keys
        self._metrics, self._devices, self._document = counted, devices, document

    @route("POST", "/session", body=KEY, answer=None, needs_key=False)
    async def sign_in(self, request: Request) -> Response:
        """Signs the page in: `{"key": "..."}` becomes its cookie."""
        try:
            key = msgspec.json.decode(await request.body(), type=dict[str, str])["key"]
        except (msgspec.DecodeError, KeyError):
            raise RefusedError("there is no key", param="key", expected='{"key": "..."}') from None
        if self._keys and self._keys.find(key) is None:
            raise RefusedError("the key is not valid", 401, code="invalid_api_key", param="key")
        answer = Response(status_code=204)
        if self._keys:
            answer.set_cookie(
                COOKIE, key, httponly=True, samesite="strict", secure=request.url.scheme == "https"
            )
        return answer

    @route("DELETE", "/session", answer=None, needs_key=False)
    async def sign_out(self, request: Request) -> Response:
        """Signs the page out: its cookie is forgotten."""
        answer = Response(status_code=204)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @route("GET", "/healthz", answer=STATE, failure=STATE, needs_key=False)
    async def healthy(self, request: Request) -> Response:
        """Answers whether the server works."""
        return (
            json_answer({"status": "ok"})
            if self._store.alive
            else json_answer({"status": "the store has ended"}, 503)
        )

    @route("GET", "/readyz", answer=STATE, failure=STATE, needs_key=False)
    async def ready(self, request: Request) -> Response:
        """Answers whether a first step could run, and there is room for its video."""
        if self._queue.turns.closing:
            return json_answer({"status": "ending"}, 503)
        if (lack := self._queue.room.lack_logged()) is not None:
            return json_answer({"status": lack}, 503)
        if any(device.ready.is_set() for device in self._devices):
            return json_answer({"status": "ready"})
        problem = next((device.problem for device in self._devices if device.problem), None)
        return json_answer({"status": "loading" if problem is None else self._queue.board.told(problem)}, 503)

    @route("GET", "/metrics", answer=Content(TEXT, ("text/plain",)))
    async def counted(self, request: Request) -> Response:
        """Answers metrics for Prometheus.

        They are waiting and running jobs, videos by state, failures by kind, seconds by phase, and how fast
        live videos are.
        """
        return Response(self._metrics.text(), media_type=metrics.TYPE)

    @route("GET", "/openapi.json", answer=OBJECT)
    async def openapi(self, request: Request) -> Response:
        """Answers the description of these routes, whose fields are made of the options' own rows."""
        return Response(self._document, media_type=JSON)
