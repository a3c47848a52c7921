"""What the videos that wait or run were resolved to, in memory: after a start they are resolved again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wanrun import Generation

MAX_STEPS: Final = 1000
"""A generation of more steps is resolved again when it is begun: its table takes up to half a megabyte."""


class Resolved:
    """Generations by the ids of their videos."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}

    def keep(self, id: str, generation: Generation) -> None:
        """Keeps the generation of a video, instead of any other of it."""
        self.drop(id)
        if len(generation.table.timesteps) <= MAX_STEPS:
            self._generations[id] = generation

    def find(self, id: str) -> Generation | None:
        """Returns the generation of a video; None if it is not kept."""
        return self._generations.get(id)

    def drop(self, id: str) -> None:
        """Forgets the generation of a video."""
        self._generations.pop(id, None)
