"""The server as a whole: its parts are made, run side by side, and end in order."""

from __future__ import annotations

__all__ = ["Service"]

import asyncio
import contextlib
import ctypes
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import wanrun
from wanreport import STYLE
from wanrun.errors import UsageError
from wanserve import database as stored
from wanserve.builds import Builds
from wanserve.catalog import Catalog
from wanserve.changes import Changes
from wanserve.codes import AnyCode
from wanserve.database import VideoDatabase
from wanserve.device import Device
from wanserve.environments import environments
from wanserve.folders import Folders
from wanserve.guard import Guard, answer, too_slow
from wanserve.keys import Keys
from wanserve.live_routes import LiveRoutes
from wanserve.metrics import Metrics
from wanserve.openapi import openapi
from wanserve.process import WorkerProcess, begin_line
from wanserve.protocol import BoundedProtocol
from wanserve.publisher import Publisher
from wanserve.queue import Queue
from wanserve.refusal import RefusedError
from wanserve.retention import outdated
from wanserve.route import addresses, routes_of
from wanserve.routes import Routes
from wanserve.server_routes import ServerRoutes
from wanserve.settings import Settings

ROUTES: Final = (*routes_of(Routes), *routes_of(LiveRoutes), *routes_of(ServerRoutes))
"""Of the API, without the page."""

PAGE: Final = Path(__file__).parent / "page"
CLEAN_SECONDS: Final = 30.0
_M_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""

MAX_CONNECTIONS: Final = 2000
MAX_OF_KEY: Final = 256
"""Requests of a key at a time: each may have an answer of megabytes that waits to be read."""

LEAST_CONNECTIONS: Final = 16
OWN_FILES: Final = 128
"""Open files of the server itself."""

MAX_PEM: Final = 1 << 20


class Service:
    """A server.

    Args:
        settings: what is served, where, and within which limits.
        keys: the clients.
        first: a worker that was started already, for the first device.

    Raises:
        WanError: if an artifact, the folder of data or the address cannot be used.
    """

    def __init__(self, settings: Settings, keys: Keys, first: WorkerProcess | None = None) -> None:
        Image.MAX_IMAGE_PIXELS = settings.max_pixels  # this process only reads what clients send
        _give_back_memory()
        self._settings, self.keys = settings, keys
        self.catalog = Catalog(
            settings.artifacts,
            "stream" if settings.loading.get("memory") == "stream" else None,
            settings.build,
            settings.build_limit,
        )
        self.socket = bound(settings)
        self._folders = Folders(settings.data)
        self._store = VideoDatabase(self._folders.database)
        self._metrics = Metrics()
        self.queue = Queue(settings, self._folders, self._store, Publisher(), self._metrics)
        self.intake = Changes(settings, self.catalog, self.queue, self._folders)
        manifests = [model.manifest for model in self.catalog.models.values()]
        places, begin = (
            environments(manifests, settings.workers),
            begin_line(settings.artifacts, settings.loading, settings.max_pixels),
        )
        target = settings.loading.get("target")
        builds = Builds(self.catalog, target, self.intake.asked) if settings.build else None
        self.devices = [
            Device(
                self.queue,
                partial(WorkerProcess, place, begin),
                self.intake.make,
                self._metrics,
                first if number == 0 else None,
                builds,
                place,
            )
            for number, place in enumerate(places)
        ]
        self.queue.board.workers = len(self.devices)
        self._watch()
        self._end = asyncio.Event()
        self._grace = settings.grace_seconds

    def _watch(self) -> None:
        """Shows the states of the parts among the metrics."""
        queue, devices, watch = self.queue, self.devices, self._metrics.watch
        watch("waiting", "Jobs that wait.", lambda: len(queue.waiting))
        watch("running", "Jobs that run.", lambda: queue.running)
        watch("ready_workers", "Workers that are ready.", lambda: sum(one.ready.is_set() for one in devices))

    def app(self) -> Guard:
        """Returns the ASGI application."""
        videos = Routes(
            self.catalog, self.queue, self.intake, self._folders, self._store, lambda: self.loaded
        )
        document = openapi(self.catalog, ROUTES)
        server = ServerRoutes(self.queue, self._store, self.keys, self._metrics, self.devices, document)
        page = [
            Route("/", lambda request: FileResponse(PAGE / "index.html"), methods=["GET"]),
            Route("/page/style.css", lambda request: FileResponse(STYLE), methods=["GET"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            RefusedError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            TimeoutError: lambda request, error: answer(too_slow()),
            OSError: self._lacking,
            sqlite3.Error: self._lacking,
            Exception: _fail,
        }
        live = LiveRoutes(self.queue, self._folders)
        routes = [*addresses(videos), *addresses(live), *addresses(server), *page]
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        most, open_paths = (
            min(connections() // 2, MAX_OF_KEY),
            {one.path for one in ROUTES if not one.needs_key},
        )
        return Guard(app, self._settings, self.keys, self._metrics, most, open_paths)

    @property
    def loaded(self) -> set[str]:
        """The models that workers hold."""
        return {name for device in self.devices for name in device.loaded}

    def _lacking(self, request: Request, error: Exception) -> Response:
        """Answers an error of the disk or of the database: for want of room, or one of our own."""
        if (refused := self.queue.room.refusal(error)) is None:
            raise error
        return answer(refused)

    async def run(self, say: Callable[[str], None], opened: Callable[[str], None] = lambda url: None) -> None:
        """Serves until a signal comes.

        Args:
            say: prints a line.
            opened: gets the page's URL once requests are answered.

        Raises:
            WanError: if the first artifact cannot be loaded.
            UsageError: if the videos' folder is full.
        """
        try:
            await self.queue.restore()
        except sqlite3.Error as error:
            raise UsageError("unwritable", "the states of the jobs cannot be stored", found=error) from None
        self._take_signals()
        server = _Server(self._config())
        keeping = [asyncio.create_task(device.keep()) for device in self.devices]
        cleaning = asyncio.create_task(self._clean())
        answering = asyncio.create_task(server.serve(sockets=[self.socket]))
        ending = asyncio.create_task(self._end.wait())
        say(f"serving {', '.join(self.catalog.models)} at {self.url}")
        opened(self.url)
        preparing = asyncio.create_task(asyncio.to_thread(self.catalog.prepare))
        try:
            await asyncio.wait({*keeping, answering, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.queue.turns.closing = True
            await self.queue.lives.close()
            await asyncio.gather(*(device.stop(self._grace) for device in self.devices))
            results = await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.gather(*(device.settle() for device in self.devices))
            self.queue.hub.close()
            self.intake.close()
            server.should_exit = True
            ending.cancel()
            cleaning.cancel()
            await asyncio.gather(answering, ending, cleaning, preparing, return_exceptions=True)
            with contextlib.suppress(sqlite3.Error):
                await self.queue.store_again()
            await asyncio.to_thread(self._store.close)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _config(self) -> uvicorn.Config:
        tls = self._settings.certificate
        BoundedProtocol.timeout_header = self._settings.body_seconds
        config = uvicorn.Config(
            self.app(),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=True,
            server_header=False,
            limit_concurrency=connections(),
            timeout_graceful_shutdown=3,
            ssl_certfile=None if tls is None else str(tls[0]),
            ssl_keyfile=None if tls is None else str(tls[1]),
            ssl_keyfile_password="none",  # or OpenSSL asks the terminal for that of an encrypted key
        )
        check_certificate(tls)
        try:
            config.load()
        except (OSError, ValueError) as error:
            raise UsageError("unreadable", "the TLS certificate cannot be used", found=error) from None
        return config

    @property
    def url(self) -> str:
        """The page's address."""
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self._settings.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"

    def _take_signals(self) -> None:
        """Has SIGTERM and Ctrl-C end the server, a second one at once."""

        def come() -> None:
            if self._end.is_set():
                for device in self.devices:
                    device.hurry()
            self.queue.turns.closing = True
            self._end.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, come)

    async def _clean(self) -> None:
        """Stores what could not be stored, and forgets old videos, again and again."""
        while True:
            for step in (self.queue.store_again, self._forget_old):  # the second makes room for the first
                with contextlib.suppress(Exception):  # a full disk: later again
                    await step()
            await asyncio.sleep(CLEAN_SECONDS)

    async def _forget_old(self) -> None:
        """Forgets videos that are not kept."""
        ended = await self._store.change(stored.ended_videos)
        kept, most = self._settings.kept_seconds, self._settings.keep_bytes
        for id in outdated(ended, time.time(), kept, most):
            with contextlib.suppress(RefusedError):  # removed meanwhile
                await self.queue.delete(self.queue.find(id, None))


def _give_back_memory() -> None:
    """Has large blocks freed to the system at once: pictures would stay in the heaps of the threads."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class _Server(uvicorn.Server):
    """uvicorn's server, without its handlers of signals: jobs end first, and can be looked at meanwhile."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def connections() -> int:
    """Returns how many connections may be open: each may have a file too, and others are open besides."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max((soft - OWN_FILES) // 2, LEAST_CONNECTIONS))


def check_certificate(files: tuple[Path, Path] | None) -> None:
    """Reads the files of a certificate: OpenSSL would wait for a pipe's writer, and read a device for ever.

    Raises UsageError if they cannot be read.
    """
    try:
        for file in files or ():
            wanrun.read_bounded(file, MAX_PEM)
    except OSError as error:
        raise UsageError(
            "unreadable", "the TLS certificate cannot be used", found=error.strerror or error
        ) from None


def bound(settings: Settings) -> socket.socket:
    """Returns a socket that listens; raises UsageError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            "busy",
            f"cannot listen at {settings.host}:{settings.port}",
            found=getattr(error, "strerror", None) or error,
            remedy="choose another --port or --host",
        ) from None


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return answer(error)


def _refuse_http(request: Request, error: Exception) -> Response:
    """Answers Starlette's own errors, of an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = {
        404: "there is nothing at this address; openapi.json says what there is, and healthz is the check",
        405: "this address does not take the method",
    }
    codes: dict[int, AnyCode] = {404: "not_found", 405: "method_not_allowed"}
    code: AnyCode = codes.get(error.status_code, "invalid_value")
    headers = dict(error.headers or {})
    text = what.get(error.status_code, str(error.detail))
    return answer(RefusedError(text, error.status_code, code=code, headers=headers))


def _fail(request: Request, error: Exception) -> Response:
    """Answers an error of our own: uvicorn writes its traceback into the log, and the client sees none."""
    return answer(RefusedError("internal error", 500, code="internal_error", remedy="see the server's log"))
