"""The routes of the server are those that are declared; tests/test_readme.py compares the page's table."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount, Route

from helpers.asked import Asked, asked, catalog
from wanserve.keys import Client, Keys
from wanserve.refusal import RefusedError
from wanserve.route import RouteParameter
from wanserve.routes import Routes
from wanserve.server_routes import ServerRoutes
from wanserve.service import ROUTES

OF_THE_PAGE = {"GET /", "GET /page/style.css", "MOUNT /page"}
"""What a browser shows, which is no part of the API."""

KEYS = Keys([Client("a", hashlib.sha256(b"a" * 20).digest())])


def served(server: Asked) -> Iterator[str]:
    """The routes of the application below the guard."""
    (app,) = (part for part in vars(server.app).values() if isinstance(part, Starlette))
    for route in app.routes:
        if isinstance(route, Route):
            yield from (f"{method} {route.path}" for method in route.methods or () if method != "HEAD")
        else:
            assert isinstance(route, Mount)
            yield f"MOUNT {route.path}"


async def test_what_is_declared_is_served_and_described(tmp_path: Path) -> None:
    declared = [f"{route.method} {route.path}" for route in ROUTES]
    async with asked(tmp_path, catalog().models) as server:
        document = json.loads((await server.call("GET", "/openapi.json")).body)
        described = [
            f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
        ]
        assert sorted(described) == sorted(declared)
        schemas = document["components"]["schemas"]
        made, changed = (schemas[name]["properties"].keys() for name in ("CreateVideo", "ChangeVideo"))
        assert (made - changed, changed - made) == ({"seeds"}, {"position"})
        assert sorted(served(server)) == sorted([*declared, *OF_THE_PAGE])


@pytest.mark.parametrize("api", [Routes, ServerRoutes])
def test_every_handler_is_declared(api: type) -> None:
    """A public method would be one without ``route`` above it."""
    assert [name for name, one in vars(api).items() if inspect.isfunction(one) and name[0] != "_"] == []


def test_every_route_is_described_in_sentences() -> None:
    assert [route.path for route in ROUTES if not route.text.endswith(".")] == []
    texts = [parameter.text for route in ROUTES for parameter in route.parameters]
    assert [text for text in texts if not text.endswith(".")] == []


async def test_a_key_is_asked_for_where_a_route_needs_one(tmp_path: Path) -> None:
    """And with it, there is no job of an unknown id."""
    async with asked(tmp_path, catalog().models, KEYS) as server:
        for route in ROUTES:
            path = re.sub(r"\{\w+\}", "none", route.path)
            answer = await server.call(route.method, path)
            assert (answer.status == 401) == route.needs_key, (route.path, answer.status)
            if "id" in route.path_parameters:
                key = {"authorization": f"Bearer {'a' * 20}"}
                assert (await server.refused(route.method, path, **key))[:2] == (404, "not_found"), path


NUMBER = RouteParameter("n", {"type": "integer", "minimum": 1, "maximum": 9, "default": 3}, "A number.")
WORD = RouteParameter("w", {"enum": ["a", "b"], "default": "b"}, "A word.")


def request(query: str) -> Request:
    return Request({"type": "http", "query_string": query.encode(), "headers": [(b"w-h", b"header")]})


def test_a_parameter_holds_requests_to_its_schema() -> None:
    assert (NUMBER.whole(request("")), NUMBER.whole(request("n=9"))) == (3, 9)
    assert NUMBER.whole(request("n=12"), most=12) == 12
    assert (WORD.choice(request("")), WORD.choice(request("w=a"))) == ("b", "a")
    assert RouteParameter("w-h", {}, "", "header").of(request("w-h=query")) == "header"
    assert RouteParameter("x", {}, "").of(request("")) is None
    for given, take in (
        ("n=0", NUMBER.whole),
        ("n=10", NUMBER.whole),
        ("w=", WORD.choice),
        ("w=c", WORD.choice),
    ):
        with pytest.raises(RefusedError) as refused:
            take(request(given))
        assert refused.value.param == given[0]
