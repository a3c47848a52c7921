"""The rows of a dataset in a place for results: who makes them, their records, and their videos."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import wanrun
from wanfleet.uploads import Uploads
from wanrun.errors import UsageError
from wanrun.job.line import AT_ONCE, Passed

if TYPE_CHECKING:
    import pyarrow

RETRIES: Final = 3
"""How often a row is retried whose worker has died: Ray has no limit."""

Row = dict[str, Any]


class Record(NamedTuple):
    """The record of a row: how its videos were made, as JSON, and their names."""

    text: str
    videos: Sequence[str]


class RowTurns:
    """Lets rows of several threads begin one after the other, at most ``AT_ONCE``."""

    def __init__(self) -> None:
        self._steps, self._places = threading.Lock(), threading.Semaphore(AT_ONCE)

    @contextlib.contextmanager
    def taken(self, alone: bool) -> Iterator[Passed]:
        """Waits until the previous row has made its steps, or has ended; yields what lets the next begin."""
        with contextlib.ExitStack() as turn, contextlib.ExitStack() as places:
            turn.enter_context(self._steps)
            for _ in range(AT_ONCE if alone else 1):
                places.enter_context(self._places)
            yield (lambda: None) if alone else turn.close


class RowStore:
    """The rows that a worker makes, in a place for results."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads, self._turns = uploads, RowTurns()

    def made(self, name: str, request: str) -> Row | None:
        """Returns the columns added to a row whose videos are there; None for one that is to be made."""
        begun = self._begun(name, request)
        return None if begun is None or not all(map(self._uploads.has, begun.videos)) else self._told(begun)

    @contextlib.contextmanager
    def turn(self, name: str, folder: Path) -> Iterator[Passed]:
        """Waits for a row's turn, and counts in the output how many workers began it without ending it."""
        tries = f"{name}.tries"
        died = len(self._uploads.read(tries) or b"")  # maybe of this row: it is made alone
        with self._turns.taken(alone=died > 0) as passed, self._removed(tries):
            if died > RETRIES:
                raise UsageError(
                    "process_lost",
                    f"{died} workers have ended in the middle of it",
                    remedy="see Ray's log, and run it again",
                )
            (folder / tries).write_bytes(bytes(died + 1))
            self._uploads.put(folder / tries, tries, overwrite=True)
            yield passed

    @contextlib.contextmanager
    def _removed(self, tries: str) -> Iterator[None]:
        """Removes the files that count a row's tries, at its end."""
        try:
            yield
        finally:
            with contextlib.suppress(UsageError):  # where nothing may be removed, rows are made all the same
                self._uploads.remove(tries)

    def deliver(self, name: str, files: Sequence[Path], facts: Row) -> Row:
        """Uploads the videos of a row after their record: a video without a record is not of a row."""
        told = Record(json.dumps(facts, sort_keys=True, default=str), facts["videos"])
        record = files[0].with_name("record")
        record.write_text(told.text)
        foreign = self._uploads.begin(
            record,
            f"{name}.json",
            told.videos,
            lambda: self._begun(name, facts["request"]) is not None,
        )
        if foreign is not None:
            raise UsageError(
                "exists",
                f"{self._uploads.where(foreign)} is there, and has no record",
                remedy="choose another output",
            )
        made = [self._uploads.put_video(file) for file in files]
        return self._told(told) | {"made": any(made)}

    def _begun(self, name: str, request: str) -> Record | None:
        """Returns the record of a row; None if there is none; UsageError if it is of another request."""
        record = self._uploads.read(f"{name}.json")
        if record is None:
            return None
        try:
            facts = json.loads(record)
            videos = facts["videos"]
            if facts["request"] == request and all("/" not in video for video in videos):
                return Record(record.decode(), videos)
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise UsageError(
            "exists",
            f"{self._uploads.where(name)} exists, and was made with other options",
            remedy="choose another output",
        )

    def _told(self, record: Record) -> Row:
        """Returns the columns added to a row."""
        return {"videos": [self._uploads.where(one) for one in record.videos], "metadata": record.text}


def added_types() -> dict[str, pyarrow.DataType]:
    """Returns the types of the added columns: Arrow would infer none from an empty list of videos."""
    import pyarrow

    return {
        "videos": pyarrow.list_(pyarrow.string()),
        "metadata": pyarrow.string(),
        "made": pyarrow.bool_(),
        "error": pyarrow.string(),
        "seconds": pyarrow.float64(),
    }


def request_of(generation: wanrun.Generation, inputs: Any, drawn: bool) -> str:
    """Returns a digest of what decides a row's videos; the names of input files are not part of it."""
    if inputs is not None:
        content = {name: fact for name, fact in inputs.facts.items() if f"{name}_sha256" not in inputs.facts}
        inputs = replace(inputs, facts=content)
    return digest(generation.metadata(inputs, {"wanrun": "", "drawn": drawn}))


def digest(value: Any) -> str:
    """Returns the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Returns a Python value for one of NumPy's, and a list for an array of texts."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return value.tolist() if str(getattr(value, "dtype", "")) == "object" else value


def check_suffix(suffix: str) -> None:
    """Raises UsageError for an unknown kind of video, which otherwise shows only when one is made."""
    if suffix.lower() not in wanrun.SUFFIXES:
        raise UsageError(
            "unsupported",
            "the suffix is no kind of video",
            expected="one of " + ", ".join(wanrun.SUFFIXES),
            found=suffix,
        )
