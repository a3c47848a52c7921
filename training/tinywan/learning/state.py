"""The state of a training, saved now and then, from which it goes on as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

EVERY = 500
"""Steps between two states."""


class Stateful(Protocol):
    """A module or an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class State:
    """Saves parts of a training with the state of everything that draws numbers.

    Args:
        file: where.
        parts: what has a state.
        rng: numpy's source of randomness; torch's own is saved too.
    """

    def __init__(self, file: Path, parts: Sequence[Stateful], rng: np.random.Generator) -> None:
        self._file, self._parts, self._rng = file, parts, rng

    def resumed(self) -> int:
        """Loads the last state; returns the steps that it had, 0 if there is none."""
        if not self._file.exists():
            return 0
        saved = torch.load(self._file, weights_only=False)
        for part, state in zip(self._parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        self._rng.bit_generator.state = saved["numpy"]
        torch.set_rng_state(saved["torch"])
        return int(saved["step"])

    def save(self, step: int) -> None:
        """Saves the state after every ``EVERY`` steps."""
        if step % EVERY:
            return
        half = self._file.with_suffix(".half")
        states = [part.state_dict() for part in self._parts]
        numbers = {"numpy": self._rng.bit_generator.state, "torch": torch.get_rng_state()}
        torch.save({"step": step, "parts": states, **numbers}, half)
        half.replace(self._file)

    def remove(self) -> None:
        """Removes the last state: the training is done."""
        self._file.unlink(missing_ok=True)
