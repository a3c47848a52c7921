"""What the server and a worker tell each other: lines of JSON over a socket pair."""

from __future__ import annotations

__all__ = ["begin_line"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from wanrun import Artifact

NO_ROOM: Final = "the disk of the server has no room for the video; ask for it again later"


class Begin(Struct, tag=True):
    """To a worker, once: what it has, and how it is loaded.

    Attributes:
        artifacts: the folder of each artifact by model, and the address that it comes from, or "". The first
            is loaded now.
        loading: keywords of ``wanrun.load``.
    """

    artifacts: dict[str, tuple[str, str]]
    loading: dict[str, Any]


class Run(Struct, tag=True):
    """To a worker: make a job's videos.

    Attributes:
        id: the job.
        model: its model.
        options: keywords of ``wanrun.resolve``, with the paths of media.
        folder: an empty folder for the results.
        format: suffix of the videos.
    """

    id: str
    model: str
    options: dict[str, Any]
    folder: str
    format: str


class Cancel(Struct, tag=True):
    """To a worker: end this job."""

    id: str


class Ready(Struct, tag=True):
    """Of a worker: the first step of the first model could run."""


class Broken(Struct, tag=True):
    """Of a worker, which ends: the first model cannot be loaded."""

    message: str
    exit_code: int


class Now(Struct, tag=True):
    """Of a worker: what it does for a job."""

    id: str
    phase: str
    step: int
    steps: int | None


class Done(Struct, tag=True):
    """Of a worker: the videos of a job are in its folder.

    Attributes:
        id: the job.
        resolved: the options of its videos, as their metadata has them.
        seconds: what each phase took.
        steps: denoising steps, of all windows.
        warnings: of ``wanrun``.
    """

    id: str
    resolved: dict[str, Any]
    seconds: dict[str, float]
    steps: int
    warnings: list[str]


class Failed(Struct, tag=True):
    """Of a worker: a job has failed. If ``ends``, the worker ends too, for a new one with free memory."""

    id: str
    code: str
    message: str
    ends: bool = False


class Cancelled(Struct, tag=True):
    """Of a worker: a job is cancelled, and the device is free."""

    id: str


ToWorker = Begin | Run | Cancel
OfWorker = Ready | Broken | Now | Done | Failed | Cancelled


def line(message: ToWorker | OfWorker) -> bytes:
    """Returns a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def begin_line(artifacts: Mapping[str, Artifact], loading: Mapping[str, Any]) -> bytes:
    """Returns the first line for a worker: the folder of each model, and keywords of ``wanrun.load``."""
    places = {name: (str(one.folder), one.origin) for name, one in artifacts.items()}
    return line(Begin(places, dict(loading)))


def of_worker(data: bytes) -> OfWorker:
    """Reads a worker's line."""
    return msgspec.json.decode(data, type=OfWorker)


def to_worker(data: bytes) -> ToWorker:
    """Reads the server's line."""
    return msgspec.json.decode(data, type=ToWorker)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as JSON can hold them; what it cannot becomes its ``str``."""
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(options), enc_hook=str))
    return decoded
