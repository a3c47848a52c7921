"""From a request to a job: the fields are read, files stored, and everything is checked before it waits."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from wanrun import CancelToken
from wanrun.errors import ArtifactError, CancelledError, WanError
from wanserve.bodies import Bodies
from wanserve.catalog import Catalog
from wanserve.desk import Desk
from wanserve.fields import Wish, read_wish
from wanserve.folders import Folders
from wanserve.forms import Form
from wanserve.job import Job, Upload
from wanserve.keys import Client
from wanserve.messages import Run
from wanserve.names import MEDIA, NO_EFFECT, options_by_name
from wanserve.refusal import RefusedError, closing, refused, told_with, unknown, whole

if TYPE_CHECKING:
    from wanrun import Generation

MAX_KEY = 255
"""Characters of an idempotency key."""

DECODERS = 3
"""Requests whose images and videos are decoded at a time, one of each client: a process of up to 1.5 GB."""

_STAND_FOR = {"seconds": "num_frames", "width": "size", "height": "size"}
_SHAPE = ("size", "num_frames", "num_videos", "guidance_scale", "profile")


class Intake:
    """Makes jobs of requests.

    Args:
        catalog: the models.
        desk: where jobs wait.
        folders: where files are stored.
    """

    def __init__(self, catalog: Catalog, desk: Desk, folders: Folders) -> None:
        self._catalog, self._desk, self._folders = catalog, desk, folders
        self._decoders = asyncio.Semaphore(DECODERS)
        self._ending = CancelToken()
        self._own_decoder = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._own_check = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._bodies = Bodies(folders)

    async def accept(self, request: Request, client: Client) -> tuple[Job, bool]:
        """Takes a request; returns its job, and whether it is an earlier one of the same idempotency key.

        Raises:
            RefusedError: for a request that cannot be served.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
            raise RefusedError(f"the Idempotency-Key is no text of at most {MAX_KEY} characters")
        self._desk.room.check(_length(request))
        folder: Path | None = None
        try:
            async with self._bodies.read(request, client.name) as form:
                wish = await read_wish(form, self._catalog)
                folder = self._folders.incoming() if wish.sent else None
                media = await _store(wish, folder)
            with told_with(self._names(wish, folder, media)):
                paths = _paths(wish.model, media, folder)
                generation = await self._resolve(client, wish, wish.options, paths)
            job = Job(
                owner=client.name,
                model=wish.model.name,
                options={**wish.options, "seed": generation.options["seed"]},
                media=media,
                format=wish.format,
                shape=_shape(generation),
                created=time.time(),
                idempotency=key,
                fingerprint=_fingerprint(wish, wish.options, media),
            )

            def keep() -> None:
                if folder is not None:
                    self._folders.keep(folder, job.id)

            kept = await self._desk.accept(job, keep, client.max_waiting)
            return kept, kept is not job
        finally:
            if folder is not None and folder.exists():
                await asyncio.to_thread(self._folders.drop, folder)

    async def change(self, request: Request, client: Client, job: Job) -> None:
        """Changes the options, the files or the position of a waiting job.

        What is not given stays; null, or an empty text of a form, takes an option or an input away.

        Raises:
            RefusedError: if it does not wait, or cannot be made so.
        """
        self._desk.check_waiting(job)
        self._desk.room.check(_length(request))
        folder = self._folders.incoming()
        try:
            async with self._bodies.read(request, client.name) as form:
                wish, gone, place = await self._changes(form, job)
                news = await _store(wish, folder)
            if wish.spelled or news or gone:
                await self._remake(client, job, wish, gone, news, folder)
        finally:
            await asyncio.to_thread(self._folders.drop, folder)
        if place is not None:
            self._desk.check_waiting(job)
            await self._desk.move(job, place)

    async def _changes(self, form: Form, job: Job) -> tuple[Wish, set[str], int | None]:
        """Returns what a form changes of a job: what it gives, what it takes away, and the position."""
        position = form.fields.pop("position", None)
        empty = {name for name, value in form.fields.items() if value in (None, "")} - {"prompt"}
        gone = {option for name in empty for option in _named(name, job)}
        form.fields = {name: value for name, value in form.fields.items() if name not in empty}
        wish = await read_wish(form, self._catalog, job.model)
        if wish.model.name != job.model:
            raise RefusedError("the model of a job cannot be changed; make a new one", param="model")
        place = None if position is None else whole(position, 1, 10**9, "position")
        return wish, gone, place

    async def _remake(
        self, client: Client, job: Job, wish: Wish, gone: set[str], news: list[Upload], folder: Path
    ) -> None:
        """Gives a waiting job other options, and files that are in a folder."""
        before = job.options
        options = {name: value for name, value in before.items() if name not in gone} | wish.options
        replaced = {one.option for one in news} | gone
        kept = [one for one in job.media if one.option not in replaced]
        paths = _paths(wish.model, kept, self._folders.of(job.id)) | _paths(wish.model, news, folder)
        own = self._folders.names(self._folders.of(job.id), kept)
        with told_with(own | self._names(wish, folder, news)):
            generation = await self._resolve(client, wish, options, paths)
        self._desk.check_waiting(job)
        if job.options is not before:
            raise RefusedError("the video was changed meanwhile; send it again", 409, code="changed")
        for one in news:
            target = self._folders.upload(job, one)
            target.parent.mkdir(exist_ok=True)
            (folder / one.file).replace(target)
        job.options = {**options, "seed": generation.options["seed"]}
        job.media, job.shape = [*kept, *news], _shape(generation)
        job.format = wish.format if "format" in wish.spelled else job.format
        await self._desk.change(job)

    async def _resolve(
        self, client: Client, wish: Wish, options: dict[str, Any], paths: dict[str, Any]
    ) -> Generation:
        """Checks a request with its files, and returns what it makes.

        Raises:
            RefusedError: with the line of ``wanrun``.
        """
        try:
            # In a thread, one of each client: ten thousand steps take a while.
            async with self._own_check[client.name]:
                generation = await asyncio.to_thread(wish.model.resolve, {**options, **paths}, wish.spell)
            if paths:
                async with self._own_decoder[client.name], self._decoders:
                    await asyncio.to_thread(generation.read_media, cancel=self._ending, keep=False)
        except CancelledError:
            raise closing() from None
        except ArtifactError as error:
            asked = [name for name in _SHAPE if name in wish.options]
            raise refused(error, wish.spell, "not_built", asked) from None
        except WanError as error:
            raise refused(error, wish.spell) from None
        return generation

    def close(self) -> None:
        """Ends what decodes, from any thread; the requests are refused."""
        self._ending.cancel()

    def _names(self, wish: Wish, folder: Path | None, media: list[Upload]) -> dict[str, str]:
        """Returns what a client is told for the server's paths."""
        files = {} if folder is None else self._folders.names(folder, media)
        return {str(wish.model.artifact): wish.model.name, **files}

    def run(self, job: Job) -> Run:
        """Returns what tells a worker to make a job, whose folder for results is empty then."""
        model, out = self._catalog.models[job.model], self._folders.out(job.id)
        options = model.loaded(job.options) | _paths(model, job.media, self._folders.of(job.id))
        return Run(job.id, job.model, options, str(out), job.format)


def _length(request: Request) -> int:
    """The bytes of a request's body that its header tells."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdigit() else 0  # the guard has looked at it


def _named(name: str, job: Job) -> set[str]:
    """Returns the options, or the inputs, that a field without a value takes away from a job.

    Raises:
        RefusedError: for an unknown field.
    """
    if name in MEDIA:
        return {MEDIA[name]} if MEDIA[name] else {one.option for one in job.media}
    if name in _STAND_FOR:
        return {_STAND_FOR[name]}
    option = options_by_name().get(name)
    if option is None and name not in NO_EFFECT:
        raise unknown(name)
    return set() if option is None else {option}


async def _store(wish: Wish, folder: Path | None) -> list[Upload]:
    """Moves the files of a request into a folder."""
    media = list[Upload]()
    for number, sent in enumerate(wish.sent):
        assert folder is not None
        media.append(await sent.store(folder, number))
    wish.sent.clear()  # and their memory
    return media


def _paths(model: Any, media: list[Upload], folder: Path | None) -> dict[str, Any]:
    """Returns the paths of stored files by option; a list where an option takes several."""
    paths = dict[str, Any]()
    for one in media:
        assert folder is not None
        path = str(folder / one.file)
        if model.options[one.option].many:
            paths.setdefault(one.option, []).append(path)
        else:
            paths[one.option] = path
    return paths


def _shape(generation: Generation) -> dict[str, Any]:
    """Returns the facts of a job that are known before it runs."""
    profile = generation.profile
    return {
        "profile": profile.name,
        "size": f"{profile.width}x{profile.height}",
        "num_frames": profile.num_frames,
        "num_videos": profile.num_videos,
        "fps": generation.fps,
        "num_steps": len(generation.table.timesteps),
    }


def _fingerprint(wish: Wish, options: dict[str, Any], media: list[Upload]) -> str:
    """Returns a digest that is equal for equal requests."""
    facts = [wish.model.name, options, wish.format, [(one.option, one.digest) for one in media]]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
