"""A server without a socket and a worker: its application, asked in the process of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.manifests import (
    full_manifest,
    of_one_size,
    plain_adapter,
    plain_manifest,
    with_model,
    with_profiles,
    without_past,
)
from helpers.refusals import check_parts
from serve_client import Answer, encoded
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile
from wanserve.catalog import Catalog, ServedModel
from wanserve.codes import AnyCode
from wanserve.keys import Keys
from wanserve.refusal import RefusedError
from wanserve.service import Service
from wanserve.settings import Settings


@contextmanager
def denies(code: AnyCode, status: int = 400, **parts: object) -> Iterator[pytest.ExceptionInfo[RefusedError]]:
    """Checks that a block raises the error of a request, and the code and values in its answer's error."""
    with pytest.raises(RefusedError) as caught:
        yield caught
    error = caught.value.body["error"]
    assert (caught.value.status, error["code"]) == (status, code), error
    check_parts(error, **parts)


def catalog(**more: Any) -> Catalog:
    """A model of text, which is built in three shapes and has LoRAs, and one that takes images and videos."""
    full = of_one_size(full_manifest())
    built = next(iter(full.profiles.values())).options
    shapes = [Profile(96, 64, frames, 1, True, number, built) for number, frames in enumerate((17, 81))]
    text = with_profiles(
        plain_manifest(
            profiles=full.profiles,
            program_sets=full.program_sets,
            targets=full.targets,
            adapters={"style": plain_adapter("style", rank=16), "big": plain_adapter("big", rank=64)},
        ),
        [*shapes, Profile(64, 96, 17, 2, False, 2, built)],
    )
    made = Catalog({})
    made.models = {
        "text": ServedModel("text", Artifact(text, Path("/srv/text"))),
        "full": ServedModel("full", Artifact(full, Path("/srv/full"))),
    }
    made.models |= more
    return made


def in_chunks(model: ServedModel) -> ServedModel:
    """The model, as if it made videos chunk by chunk."""
    manifest = with_model(without_past(model.manifest), chunks=Chunking(first=1, each=3))
    return replace(model, artifact=replace(model.artifact, manifest=manifest))


class Asked:
    """The application of a service.

    Args:
        service: the service.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.app = service, service.app()

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Sends a request; for a body see ``encoded``. An error of our own is raised, as uvicorn sees it."""
        data, given = encoded(body, headers)
        given = {"host": "localhost", "content-length": str(len(data)), **given}
        bare, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": bare,
            "raw_path": bare.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        told = list[dict[str, Any]]()
        messages = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is None:
                await asyncio.sleep(3600)  # the client stays
            return dict(message or {})

        async def send(message: Any) -> None:
            told.append(message)

        await self.app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in told[0]["headers"]}
        return Answer(told[0]["status"], found, b"".join(one.get("body", b"") for one in told[1:]))

    async def refused(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, str]:
        """Returns the status, the code and the message of a refusal, which is one line."""
        answer = await self.call(method, path, body, **headers)
        assert answer.status >= 400, answer.body
        error = json.loads(answer.body)["error"]
        assert "\n" not in error["message"]
        return answer.status, error["code"], error["message"]


@asynccontextmanager
async def asked(
    folder: Path, models: dict[str, ServedModel], keys: Keys | None = None, **settings: Any
) -> AsyncIterator[Asked]:
    """The application of a server of some models, whose videos are in a folder."""
    service = Service(Settings({}, folder, port=0, **settings), keys or Keys())
    service.catalog.models |= models
    try:
        yield Asked(service)
    finally:
        service.socket.close()
        await asyncio.to_thread(service._store.close)
