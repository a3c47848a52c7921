"""The server's routes, its OpenAPI document and docs/serving.md have the same methods and paths."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount, Route

from helpers.asked import Asked, asked, catalog

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

OF_THE_PAGE = {"GET /", "GET /page/style.css", "MOUNT /page"}
"""What a browser shows: docs/serving.md has a section about the page, without its files."""

UNDESCRIBED = {
    *("GET /healthz", "GET /readyz", "GET /metrics"),  # for who runs the server: plain answers, no models
    *("POST /session", "DELETE /session"),  # the page's own way to keep a key, which other clients send
    "GET /openapi.json",  # the document itself
}
"""Routes that docs/serving.md names and the document does not, which is for clients that want videos."""


def without_names(route: str) -> str:
    """A method and a path; what stands for a part of the path has no name."""
    return re.sub(r"\{\w+\}", "{}", route)


def served(server: Asked) -> set[str]:
    """The routes of the application below the guard."""
    (app,) = (part for part in vars(server.app).values() if isinstance(part, Starlette))
    found = set()
    for route in app.routes:
        if isinstance(route, Route):
            found |= {without_names(f"{method} {route.path}") for method in route.methods or ()}
        else:
            assert isinstance(route, Mount)
            found.add(f"MOUNT {route.path}")
    return {route for route in found if not route.startswith("HEAD ")}  # Starlette adds it to each GET


def test_routes_document_and_page_say_the_same(tmp_path: Path) -> None:
    async def test() -> None:
        async with asked(tmp_path, catalog().models) as server:
            document = json.loads((await server.call("GET", "/openapi.json")).body)
            described = {
                without_names(f"{method.upper()} {path}")
                for path, methods in document["paths"].items()
                for method in methods
            }
            named = re.findall(r"`((?:GET|POST|PATCH|PUT|DELETE) /\S*)`", PAGE.read_text(encoding="utf-8"))
            routes = served(server) - OF_THE_PAGE
            assert served(server) >= OF_THE_PAGE and not UNDESCRIBED & described
            assert sorted(routes) == sorted(described | UNDESCRIBED)
            assert sorted(routes) == sorted({without_names(route) for route in named})

    asyncio.run(test())
