"""The messages between the server and a worker: lines of JSON over a socket pair."""

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
    return error.code, NO_ROOM if isinstance(error, NoSpaceError) else str(error)


class Going(Struct):
    """How long a live job goes on, chunk by chunk: in frames (None for no end), and at most in seconds."""

    frames: int | None
    seconds: float


class Make(Struct, tag=True):
    """To a worker: run a job of a model, whose outputs are in an empty folder.

    ``live`` is how it goes on if it is live; None for other jobs.
    """

    model: str
    job: PackedJob
    live: Going | None = None


class Go(Struct, tag=True):
    """To a worker: so many chunks of a live job may be made, from its first on."""

    id: str
    chunks: int


class Steer(Struct, tag=True):
    """To a worker: the prompt of a live job from its next chunk on."""

    id: str
    prompt: str


class Cancel(Struct, tag=True):
    """To a worker: end this job."""

    id: str


class Look(Struct, tag=True):
    """To a worker: a client looks at this job, so a preview of it is wanted."""

    id: str


class Preview(Struct, tag=True):
    """Of a worker: a preview of the job that it has, after so many denoising steps.

    ``image`` is a WebP with a small picture of each latent frame.
    """

    id: str
    step: int
    image: bytes


class Fragment(Struct, tag=True):
    """Of a worker: a chunk of the live job that it has is a file that can be played.

    Attributes:
        number: of the chunk, from 0.
        first: number of its first frame in the video.
        frames: how many it has.
        nbytes: of the file.
        seconds: from the request for the chunk to its frames.
        prompt: what it was made by.
        media_type: of the whole video, with its codecs.
    """

    id: str
    number: int
    first: int
    frames: int
    nbytes: int
    seconds: float
    prompt: str
    media_type: str


class Ready(Struct, tag=True):
    """Of a worker: a first step could run. It is sent once the first model is loaded, and after each load.

    ``loaded`` are the models that it holds.
    """

    loaded: list[str]


class Broken(Struct, tag=True):
    """Of a worker, which ends: the first model cannot be loaded."""

    error: WanError


ToWorker = Begin | Make | Cancel | Look | Go | Steer
OfWorker = Ready | Broken | Event | Preview | Fragment | Outcome
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
