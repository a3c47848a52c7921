"""The outcome of a job, in the process that ran it and on the way to another."""

from __future__ import annotations

__all__ = ["plain"]

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from wanrun.errors import WanError


class Outcome(Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of a job.

    Attributes:
        id: the job.
        metadata: that of its videos, without each video's number, as JSON holds it; empty after an error.
        seconds: what each phase took, without loading.
        elapsed: seconds from its beginning to its end, with loading.
        steps: denoising steps, of all windows.
        sizes: bytes of each written file by its path.
        warnings: one line each.
        error: why there are no videos; a CancelledError if it was cancelled. None for a job that has them.
    """

    id: str
    metadata: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    elapsed: float = 0.0
    steps: int = 0
    sizes: dict[str, int] = {}
    warnings: list[str] = []
    error: WanError | None = None


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as JSON can hold them; what it cannot becomes its ``str``."""
    decoded: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))  # surrogates too
    return decoded


def to_wire(record: Any) -> bytes:
    """Returns a record for another process, as JSON in one line.

    Args:
        record: an ``Event``, an ``Outcome``, a ``PackedJob``, or another msgspec record, which may hold
            those.
    """
    return msgspec.json.encode(record, enc_hook=_written)


def from_wire(data: bytes, type: Any) -> Any:
    """Returns the record of ``to_wire``.

    Args:
        data: the line.
        type: the type of the record, or a union of types.

    Raises:
        msgspec.DecodeError: for a line of anything else.
    """
    return msgspec.json.decode(data, type=type, dec_hook=_read)


def _written(value: object) -> dict[str, Any]:
    """Returns an error as the names of its classes, the nearest first, and its parts."""
    if not isinstance(value, WanError):
        raise NotImplementedError(f"{type(value).__name__} is not sent to another process")
    parts = {name: None if part is None else str(part) for name, part in value.parts.items()}
    classes = [kind.__name__ for kind in type(value).__mro__ if issubclass(kind, WanError)]
    return {"classes": classes, **parts}


def _read(wanted: type, value: Any) -> Any:
    """Returns an error of its parts, of the nearest class that this process has imported."""
    if wanted is not WanError:
        raise NotImplementedError(wanted.__name__)
    known = {kind.__name__: kind for kind in _family(WanError)}
    return next(known[name] for name in value.pop("classes") if name in known)(**value)


def _family(kind: type[WanError]) -> list[type[WanError]]:
    """Returns a class of errors and those derived from it that are made of the same parts."""
    derived = [one for each in kind.__subclasses__() for one in _family(each)]
    return [kind, *(one for one in derived if one.__init__ is WanError.__init__)]
