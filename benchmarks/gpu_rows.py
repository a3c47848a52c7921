"""The rows that gpu.py prints. A measuring process writes each at once, so that none is lost if it dies."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

COMPILES = 1.0
"""The tolerance of a compilation's seconds, which depend on the host."""


def chip_name(device_kind: str) -> str:
    """Returns a name for a GPU that the project's table of chips does not have."""
    words = re.sub(r"nvidia|geforce", "", device_kind.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def reason(error: BaseException) -> str:
    """Returns an error as one line of at most 240 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"[:240]


class Rows:
    """Rows in a file, one JSON object a line: what, value, unit, note, failed, and further facts.

    Args:
        path: the file; rows are appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self, what: str, value: float | None = None, unit: str = "", note: str = "", **facts: Any
    ) -> None:
        """Adds a figure, or only a note.

        Args:
            what: what was measured.
            value: the figure.
            unit: its unit.
            note: a remark.
            facts: other fields: ``tflops`` are compared with those of rows that have ``ceiling``;
                ``seconds`` are all that were measured; a row with ``begun`` is left out if another of its
                name follows; ``tolerance`` is kept in the place of the part's.
        """
        self._write({"what": what, "value": value, "unit": unit, "note": note, "failed": False, **facts})

    def fail(self, what: str, why: str) -> None:
        """Adds what could not be measured, and the reason."""
        self._write({"what": what, "value": None, "unit": "", "note": why, "failed": True})

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Adds the reason as a row if the block raises an error, and goes on after it."""
        try:
            yield
        except Exception as error:
            self.fail(what, reason(error))

    def read(self) -> list[dict[str, Any]]:
        """Returns the rows so far; leaves out a last one that is not whole, and what has begun and ended."""
        found: list[dict[str, Any]] = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if found and found[-1].get("begun") and found[-1]["what"] == row["what"]:
                    found.pop()
                found.append(row)
        return found

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows of another process."""
        for row in rows:
            self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main(measures: Mapping[str, Callable[[Rows, Mapping[str, Any]], None]]) -> None:
    """Runs ``SCRIPT NAME JSON``: one of the measures, whose rows go to the JSON's ``rows``."""
    arguments = json.loads(sys.argv[2])
    rows = Rows(Path(arguments["rows"]))
    with rows.attempt(sys.argv[1]):
        measures[sys.argv[1]](rows, arguments)
