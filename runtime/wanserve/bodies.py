"""The bodies of requests: each comes at its client's pace, and the large ones are read one at a time."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, Any, Final

from starlette.requests import Request

from wanserve.folders import Folders
from wanserve.forms import RequestBody, read_form
from wanserve.refusal import RefusedError

SMALL: Final = 1 << 16
"""Bytes of a body that is read at once, in memory."""

MAX_LARGE: Final = 16
"""Larger bodies of a client that come at a time."""

WAIT_SECONDS: Final = 10.0
"""For which another one waits."""

TURN_SECONDS: Final = 30.0
"""For which one that has come waits for its turn."""


class Bodies:
    """The bodies of requests, as they are received and read.

    A large one comes into a file without a name. Once it is whole it has its turn: what it holds is in memory
    then, and no other's is. Of each client one waits for that, and one small one is read at a time, so that
    those who send many do not hold up the others.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_LARGE))
        self._next = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._small = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: Request, client: str) -> AsyncIterator[RequestBody]:
        """Gives the form of a request to a block, which has to drop what is large; the form does.

        ``client`` is the name of its key. Raises RefusedError as ``read_form``, and if too many others come;
        OSError if there is no room for it.
        """
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) <= SMALL:
            body = io.BytesIO(await request.body())
            async with _held(TURN_SECONDS, self._small[client]), _form(request, body) as form:
                yield form
            return
        async with _held(WAIT_SECONDS, self._slots[client]):
            with tempfile.SpooledTemporaryFile(SMALL, dir=self._folders.requests) as file:
                async for block in request.stream():
                    await asyncio.to_thread(file.write, block)
                file.seek(0)
                async with _held(TURN_SECONDS, self._next[client], self._turn), _form(request, file) as form:
                    yield form


@asynccontextmanager
async def _form(request: Request, file: IO[bytes]) -> AsyncIterator[RequestBody]:
    """Reads a form, and lets go of its values and its files."""
    form = await read_form(request, file)
    try:
        yield form
    finally:
        for _, upload in form.files:
            await upload.close()
        form.fields.clear()
        form.files.clear()


@asynccontextmanager
async def _held(seconds: float, *locks: Any) -> AsyncIterator[None]:
    """Holds locks, one after the other; refuses if that takes too long."""
    async with AsyncExitStack() as held:
        try:
            async with asyncio.timeout(seconds):
                for lock in locks:
                    await held.enter_async_context(lock)
        except TimeoutError:
            retry = {"Retry-After": "10", "connection": "close"}
            raise RefusedError(
                "too many uploads at a time",
                429,
                code="too_many_uploads",
                headers=retry,
                remedy="try again later",
            ) from None
        yield
