"""A log of losses: one JSON object per line, and now and then a line on the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tqdm import tqdm

EVERY = 50
"""Steps between two lines of a log."""


class Log:
    """Writes the mean losses of every ``EVERY`` steps.

    Args:
        file: what lines are added to; created if it is not there.
        stage: a name for what is trained.
        steps: their number.
    """

    def __init__(self, file: Path, stage: str, steps: int) -> None:
        self._file, self._stage = file, stage
        self._sums: dict[str, float] = {}
        self._begun = time.monotonic()
        self._bar = tqdm(total=steps, desc=stage, mininterval=10)

    def step(self, number: int, **losses: float) -> None:
        """Notes the losses of a step; ``number`` counts from 1."""
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss / EVERY
        self._bar.update()
        if number % EVERY == 0:
            means = {name: round(value, 5) for name, value in self._sums.items()}
            seconds = round(time.monotonic() - self._begun)
            with self._file.open("a", encoding="utf-8") as log:
                log.write(
                    json.dumps({"stage": self._stage, "step": number, "seconds": seconds, **means}) + "\n"
                )
            self._bar.set_postfix(means)
            self._sums.clear()
