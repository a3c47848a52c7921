"""What the server and a worker tell each other: lines of JSON over a socket pair."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

import wanrun
from wanrun import Event, Outcome, PackedJob
from wanrun.errors import ArtifactError, NoSpaceError, WanError
from wanserve.process import Begin

NO_ROOM: Final = "the disk of the server has no room for the video; ask for it again later"


class OutOfMemoryError(WanError):
    """A job has taken the memory; its worker ends, for a new one with free memory."""


class ChangedError(ArtifactError):
    """The artifact of a job is another one than when the server started: its jobs wait for the next start."""


class InternalError(WanError):
    """A job has failed by an error of the program, which the server's log shows."""


def code_of(error: WanError) -> tuple[str, str]:
    """Returns the API's code of an error that ended a job, and its message."""
    if isinstance(error, NoSpaceError):
        return "no_space", NO_ROOM
    codes: dict[type[WanError], str] = {
        OutOfMemoryError: "out_of_memory",
        InternalError: "internal_error",
        ArtifactError: "artifact_error",
    }
    return next((codes[kind] for kind in codes if isinstance(error, kind)), "generation_error"), str(error)


class Make(Struct, tag=True):
    """To a worker: run a job.

    Attributes:
        model: its model.
        job: the job, whose outputs are in an empty folder.
    """

    model: str
    job: PackedJob


class Cancel(Struct, tag=True):
    """To a worker: end this job."""

    id: str


class Look(Struct, tag=True):
    """To a worker: somebody looks at this job, so a preview of it is wanted."""

    id: str


class Preview(Struct, tag=True):
    """Of a worker: a preview of the job that it has.

    Attributes:
        id: the job.
        step: denoising steps that were done.
        image: a WebP with a small picture of each latent frame.
    """

    id: str
    step: int
    image: bytes


class Ready(Struct, tag=True):
    """Of a worker: a first step could run. It is sent once the first model is loaded, and after each load.

    Attributes:
        loaded: the models that it holds.
    """

    loaded: list[str]


class Broken(Struct, tag=True):
    """Of a worker, which ends: the first model cannot be loaded."""

    message: str
    exit_code: int


ToWorker = Begin | Make | Cancel | Look
OfWorker = Ready | Broken | Event | Preview | Outcome
"""An event is of the job that the worker has; after its outcome the device is free."""


def line(message: ToWorker | OfWorker) -> bytes:
    """Returns a message as a line."""
    return wanrun.to_wire(message) + b"\n"


def of_worker(data: bytes) -> OfWorker:
    """Reads a worker's line."""
    message: OfWorker = wanrun.from_wire(data, OfWorker)
    return message


def to_worker(data: bytes) -> ToWorker:
    """Reads the server's line."""
    message: ToWorker = wanrun.from_wire(data, ToWorker)
    return message
