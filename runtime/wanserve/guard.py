"""Middleware before every route: keys, hosts and origins, limits of size and time, and safe headers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wanserve.keys import Client, Keys
from wanserve.log import DEBUG, INFO, WARNING, tell
from wanserve.metrics import Metrics
from wanserve.refusal import RefusedError
from wanserve.settings import Settings

PAGE: Final = "/page/"
PAGE_ITSELF: Final = ("/", "/favicon.ico")

MAX_OPEN: Final = 4096
"""Bytes of a body where no key is needed."""

HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "media-src 'self' blob:; connect-src 'self'; manifest-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application around the routes.

    ``most`` are the requests of a key at a time, streams of events among them. ``open_paths`` need no key,
    like those of the page.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: Keys,
        metrics: Metrics,
        most: int,
        open_paths: Collection[str],
    ) -> None:
        self._app, self._settings, self._keys, self._metrics = app, settings, keys, metrics
        self._most_open, self._open = most, Counter[str]()
        self._open_paths = {*PAGE_ITSELF, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin, began = headers.get("origin"), time.monotonic()

        async def safe_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._complete(MutableHeaders(scope=message), origin)
                self._metrics.answered(scope["method"], message["status"])
                self._tell(scope, message["status"], time.monotonic() - began)
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and origin in self._settings.origins:
                await _preflight(headers)(scope, receive, safe_send)
                return
            client = scope.setdefault("state", {})["client"] = self._client(scope, headers)
            with self._counted(client):
                await self._app(scope, self._bounded(receive, self._most(scope["path"])), safe_send)
        except RefusedError as error:
            await answer(error)(scope, receive, safe_send)

    def _client(self, scope: Scope, headers: Headers) -> Client | None:
        """Returns who asks, None where nobody needs to be known; refuses hosts, origins, sizes and keys."""
        host = _name(headers.get("host", ""))
        if self._settings.hosts and host not in self._settings.hosts:
            raise RefusedError(
                f"the host {host[:60]!r} is not served here",
                421,
                code="wrong_host",
                remedy="see --allow-host",
            )
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            self._check_origin(headers)
        path, length = scope["path"], headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 19) or int(length) > self._most(path):
            raise self._too_large()
        if path in self._open_paths or path.startswith(PAGE):
            return None
        if (client := self._keys.of(headers)) is None:
            raise RefusedError(
                "there is no valid key in the request",
                401,
                code="invalid_api_key",
                remedy="send Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return client

    @contextlib.contextmanager
    def _counted(self, client: Client | None) -> Iterator[None]:
        """Counts a request while it is answered; refuses one that would take others' connections."""
        if client is None or not self._keys:
            yield
            return
        if self._open[client.name] >= self._most_open:
            retry = {"Retry-After": "5", "connection": "close"}
            what, expected = "too many requests of this key at a time", f"at most {self._most_open}"
            raise RefusedError(what, 429, code="too_many_requests", headers=retry, expected=expected)
        self._open[client.name] += 1
        try:
            yield
        finally:
            self._open[client.name] -= 1

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        """Logs an answer; to those who look again and again only at debug."""
        method, path, state = scope["method"], scope["path"], scope.get("state", {})
        looks = method in ("GET", "HEAD") and (status < 400 or path in self._open_paths)
        failed = WARNING if status >= 500 else INFO
        tell(
            "answered",
            DEBUG if looks else failed,
            method=method,
            path=path,  # without the query, which may have words of prompts
            status=status,
            seconds=round(seconds, 3),
            client=getattr(state.get("client"), "name", None) or None,
            address=(scope.get("client") or [None])[0],
        )

    def _most(self, path: str) -> int:
        """Returns the bytes of a body that are taken; few where no key is needed."""
        return self._settings.max_upload if path not in self._open_paths else MAX_OPEN

    def _check_origin(self, headers: Headers) -> None:
        """Refuses a request that another site's page has made, unless that site is allowed."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None or origin in self._settings.origins:
            return
        if origin.partition("://")[2] != host:
            raise RefusedError(f"pages of {origin[:60]} may not call this server", 403, code="wrong_origin")

    def _too_large(self) -> RefusedError:
        limit = self._settings.max_upload >> 20
        expected = f"at most {limit} MB"
        return RefusedError("the request is too large", 413, code="too_large", expected=expected)

    def _bounded(self, receive: Receive, left: int) -> Receive:
        """Returns a function that receives a body: at most ``left`` bytes, and within its time."""
        end: float | None = None

        async def bounded() -> Message:
            nonlocal left, end
            loop = asyncio.get_running_loop()
            if end is None:
                end = loop.time() + self._settings.body_seconds
            if end == float("inf"):  # the body has come: what follows is the end of the connection
                return await receive()
            async with asyncio.timeout_at(end):
                message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            if not message.get("more_body", False):
                end = float("inf")
            return message

        return bounded

    def _complete(self, headers: MutableHeaders, origin: str | None) -> None:
        """Adds the headers that every answer has."""
        there = set(headers.keys())
        for name, value in HEADERS.items():
            if name not in there:
                headers.append(name, value)
        if self._settings.certificate is not None:
            headers.setdefault("strict-transport-security", "max-age=31536000")
        if origin is not None and origin in self._settings.origins:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = (
                "openai-poll-after-ms, retry-after, x-video-id, idempotent-replayed"
            )
            headers["cross-origin-resource-policy"] = "cross-origin"
            headers.add_vary_header("Origin")


def _preflight(headers: Headers) -> JSONResponse:
    """Answers a browser that asks whether another site's page may call, with any headers."""
    allowed = {
        "access-control-allow-methods": "GET, POST, PATCH, DELETE",
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization"),
        "access-control-max-age": "600",
    }
    return JSONResponse({}, headers=allowed)


def _name(host: str) -> str:
    """Returns the header Host without its port."""
    if host.startswith("["):
        return host.partition("]")[0][1:].lower()
    return host.partition(":")[0].lower()


def too_slow() -> RefusedError:
    """Returns the error of a request that does not come within its time."""
    return RefusedError("the request came too slowly", 408, code="timeout", remedy="send it again")


def answer(error: RefusedError) -> JSONResponse:
    """Returns the answer of a refused request; what is left of its body is not read."""
    headers: dict[str, Any] = dict(error.headers)
    if error.status in (408, 413):
        headers["connection"] = "close"
    return JSONResponse(error.body, error.status, headers=headers)
