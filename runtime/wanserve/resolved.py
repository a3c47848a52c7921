"""What requests are resolved to: kept in memory for videos that wait or run, and shown as their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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


def shape_of(generation: Generation) -> dict[str, Any]:
    """Returns the facts of a video that are known before it runs."""
    profile, counts = generation.profile, generation.counts()
    return {
        "profile": profile.name,
        "size": f"{profile.width}x{profile.height}",
        "num_frames": counts.frames,
        "num_videos": counts.videos,
        "fps": generation.fps,
        "num_steps": counts.told_steps,
        "windows": counts.windows,
        "guided": counts.rounds * (counts.guided + counts.skipping),
        "other_frames": generation.other_frames,
    }
