"""A route in one declaration, of which Starlette's, the OpenAPI document and docs/serving.md are made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response

from wanserve.refusal import one_of, whole

JSON: Final = "application/json"
TEXT: Final[Mapping[str, Any]] = {"type": "string"}
BINARY: Final[Mapping[str, Any]] = {"type": "string", "format": "binary"}

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "mp4": "video/mp4",
        "webm": "video/webm",
        "gif": "image/gif",
        "webp": "image/webp",
        "mov": "video/quicktime",
    }
)
"""The media type of a video by its suffix."""

Handler = Callable[[Any, Request], Awaitable[Response]]
"""A method that answers a request."""


def schema_of(name: str) -> Mapping[str, Any]:
    """Returns the reference to one of the document's named schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


@dataclass(frozen=True)
class Content:
    """The content of a request or an answer: its JSON schema, and the media types that it may have."""

    schema: Mapping[str, Any]
    kinds: tuple[str, ...] = (JSON,)


OBJECT: Final = Content({"type": "object"})
ERROR: Final = Content(schema_of("Error"))


@dataclass(frozen=True)
class RouteParameter:
    """A parameter of a route, besides those in its path; ``place`` is where a request has it.

    Requests are held to the schema's default, bounds and choices. ``text`` says in a sentence what it
    chooses.
    """

    name: str
    schema: Mapping[str, Any]
    text: str
    place: Literal["query", "header"] = "query"

    def of(self, request: Request) -> str | None:
        """Returns its text in a request, else its default, else None."""
        given = request.query_params if self.place == "query" else request.headers
        default = self.schema.get("default")
        return given.get(self.name, None if default is None else str(default))

    def whole(self, request: Request, most: int | None = None) -> int:
        """Returns its number in a request, at most ``most``; None for the schema's largest.

        Raises RefusedError if it is not a number, or out of range.
        """
        least, largest = self.schema["minimum"], self.schema["maximum"] if most is None else most
        return whole(self.of(request), least, largest, self.name)

    def choice(self, request: Request) -> str:
        """Returns which of its choices a request has; raises RefusedError if it is none of them."""
        return one_of(self.of(request) or "", self.schema["enum"], self.name)


@dataclass(frozen=True)
class Route:
    """A method of an API with its declaration.

    Attributes:
        path: its path, with the names of parameters in braces.
        parameters: its parameters besides those of the path.
        body: what a request holds; None for nothing.
        answer: what is answered; None for nothing.
        failure: what is answered with a status of 5XX.
        needs_key: whether only those who have a key may ask, if the server has keys.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    handler: Handler
    parameters: tuple[RouteParameter, ...]
    body: Content | None
    answer: Content | None
    failure: Content
    needs_key: bool

    @property
    def path_parameters(self) -> list[str]:
        """The names of the parameters in its path."""
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def text(self) -> str:
        """What it does, in sentences: the docstring of its handler."""
        return " ".join((inspect.getdoc(self.handler) or "").split())


def route(
    method: Literal["GET", "POST", "PATCH", "DELETE"],
    path: str,
    *parameters: RouteParameter,
    body: Content | None = None,
    answer: Content | None,
    failure: Content = ERROR,
    needs_key: bool = True,
) -> Callable[[Handler], Route]:
    """Returns the decorator of a method that is a route; the document and the page show its docstring."""
    return lambda handler: Route(method, path, handler, parameters, body, answer, failure, needs_key)


def routes_of(api: type) -> list[Route]:
    """Returns the routes that a class declares, in its order."""
    return [one for one in vars(api).values() if isinstance(one, Route)]


def addresses(api: object) -> list[routing.Route]:
    """Returns the routes of an object's class, answered by the object."""
    return [
        routing.Route(one.path, partial(one.handler, api), methods=[one.method])
        for one in routes_of(type(api))
    ]


def json_answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer in JSON."""
    return Response(msgspec.json.encode(data), status, dict(headers or {}), JSON)


async def gone(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
