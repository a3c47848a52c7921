"""The measurements of an interrupted calibration, in the user's cache: figures by run, and arrays by name."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wanrun.files import canonical_json, read_bounded, replace_file, sha256_of, user_cache

MAX_BYTES = 2**26
"""The largest file of figures."""


class Memo:
    """Keeps measurements until the calibration ends; keeps nothing if the cache cannot be written.

    ``facts`` are everything that the measurements depend on.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._folder = user_cache() / "calibrations" / sha256_of(canonical_json(dict(facts)))[:32]
        self._figures = self._folder / "figures.jsonl"
        self._known: dict[str, float] = {}
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for line in read_bounded(self._figures, MAX_BYTES).splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # the last one may be cut
                    entry = json.loads(line)
                    self._known[str(entry["run"])] = float(entry["value"])

    def figure(self, run: Mapping[str, Any], measure: Callable[[], float]) -> float:
        """Returns a run's figure: the kept one, or what ``measure`` returns."""
        key = sha256_of(canonical_json(dict(run)))
        if key not in self._known:
            self._known[key] = measure()
            with contextlib.suppress(OSError), self._figures.open("a", encoding="ascii") as file:
                file.write(json.dumps({"run": key, "value": self._known[key]}) + "\n")
        return self._known[key]

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns an array: the kept one, or what ``make`` returns."""
        path = self._folder / f"{name}.npy"
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError):
            made = make()
        with contextlib.suppress(OSError):
            buffer = io.BytesIO()
            np.save(buffer, made)
            replace_file(path, buffer.getvalue())
        return made

    def forget(self) -> None:
        """Removes all that was kept."""
        shutil.rmtree(self._folder, ignore_errors=True)
