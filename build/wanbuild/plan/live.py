"""What a live video is like: its frames a second, and how long its first ones take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wanbuild.plan.generation import Generation, Runs
from wanrun.artifact.roles import DECODERS


@dataclass(frozen=True)
class LiveFigures:
    """What is predicted of a video that is made while it is watched, on one device.

    ``rate`` is frames a second, once all that is kept of earlier chunks is filled; ``first`` is seconds from
    the prompt to the frames of the first chunk, with all weights on the device.
    """

    rate: float
    first: float


def live_figures(generation: Generation) -> LiveFigures | None:
    """Returns what is predicted of a live video; None for a model that makes a video at once."""
    model = generation.manifest.model
    if (chunks := model.chunks) is None:
        return None

    def seconds(calls: Iterable[Runs]) -> float:
        return sum(generation.time(call, {}).seconds for call in calls)

    def steps(frames: int) -> float:
        return generation.steps * seconds(call for call in generation.makers if call.frames == frames)

    decoders = [call for call in generation.during("video") if call.role in DECODERS["full"]]
    *begins, following = decoders
    piece, own = seconds([following]), generation.pieces(following.name, chunks.first)
    first = later = seconds(begins) + own * piece
    if not chunks.alone:
        later = generation.pieces(following.name, chunks.each, further=True) * piece
    keeping = seconds(call for call in generation.during("steps") if call not in generation.makers)
    before = seconds(generation.during("prompts", "expert"))
    return LiveFigures(
        rate=model.chunk_frames / (steps(chunks.each) + keeping + later),
        first=before + steps(chunks.first) + first,
    )
