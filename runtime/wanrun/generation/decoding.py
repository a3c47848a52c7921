"""Frames of the last latents, piece by piece: those of one are fetched while the next ones are made."""

from __future__ import annotations

__all__ = ["Frames", "OnFrames"]

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.programs import Profile, decodes_any_length
from wanrun.artifact.roles import DECODERS
from wanrun.denoising.state import zeros
from wanrun.weights.bound_programs import Programs


@dataclass(frozen=True)
class Frames:
    """Some frames of a video, as they leave the decoder.

    Attributes:
        frames: uint8 (N, H, W, 3).
        first: the number of the first of them in the video, from 0.
        total: the frames of the whole video.
        video: the number of the video among those of the prompt, from 0.
        options: all options of the generation, for the video's metadata.
    """

    frames: np.ndarray
    first: int
    total: int
    video: int
    options: Mapping[str, Any]


OnFrames = Callable[[Frames], object]
"""Gets the frames of each video in their order: video after video, of windows in each of them."""

Take = Callable[[int, np.ndarray], object]
"""Gets the number of a video and its next frames, uint8 (N, H, W, 3)."""


class LatentDecoder:
    """A decoder of a profile with its weights: ``name`` is one of ``DECODERS``, None for the VAE's.

    ``check`` is called before each piece; what it raises ends the decoding. ``any_length`` says whether a
    video may have any number of frames. ``made`` are the outputs of the last call of a program, on the
    device.
    """

    def __init__(
        self, programs: Programs, name: str | None = None, check: Callable[[], object] = lambda: None
    ) -> None:
        self._check = check
        names = programs.with_role(*DECODERS[name or "full"])
        self._last, self._bound = programs[names[-1]], [programs.bound(one) for one in names]
        self.any_length = decodes_any_length(programs, name)
        self.made: Mapping[str, Any] = {}

    @property
    def enough(self) -> int | None:
        """Latent frames of a video for which every program runs; None for all."""
        return 2 if self.any_length else None

    def __call__(self, latents: np.ndarray, further: bool = False) -> Iterator[np.ndarray]:
        """Yields the frames of a video piece by piece, uint8 (N, H, W, 3), of latents, float32 (C, T, h, w).

        Where the decoder passes on a state, the video may have any number of frames, and the memory does not
        grow with it; ``further`` latents then follow those of the last call. Of any other decoder the only
        piece is the whole video.
        """
        waiting = None
        for made, real in self._pieces(latents, further):
            if waiting is not None:
                yield np.asarray(waiting[0])[waiting[1]]
            waiting = made, real
        if waiting is not None:
            yield np.asarray(waiting[0])[waiting[1]]

    def _pieces(self, latents: np.ndarray, further: bool) -> Iterator[tuple[Any, slice]]:
        """Yields the frames of each piece on the device, and which of them are the video's."""
        if not self.any_length:
            self._check()
            self.made = {"latents": latents}
            for program in self._bound:
                self.made = {**self.made, **program(**self.made)}
            yield self.made["frames"], slice(None)
            return
        *begins, following = self._bound
        size = self._last.array("latents")[1][1]
        begin, rest = (latents[:, :0], latents) if further else (latents[:, :1], latents[:, 1:])
        if begins and not further:
            self.made = begins[0](latents=begin)
        elif not further:  # the first frame is the end of a piece like all others
            state = {name: zeros(self._last.avals["inputs"][name]) for name in self._last.donated}
            self.made = following(latents=_filled(begin, size - 1, 0), first=np.int32(1), **state)
        if not further:
            yield self.made["frames"], slice(-1, None)
        for start in range(0, rest.shape[1], size):
            piece = rest[:, start : start + size]
            self._check()
            state = {name: self.made[name] for name in self._last.donated}
            filled = _filled(piece, 0, size - piece.shape[1])
            self.made = following(latents=filled, first=np.int32(0), **state)
            yield self.made["frames"], slice(piece.shape[1] * (len(self.made["frames"]) // size))


def _filled(latents: np.ndarray, before: int, after: int) -> np.ndarray:
    """Returns latents (C, T, h, w) with frames of zeros in front and behind."""
    return np.pad(latents, ((0, 0), (before, after), (0, 0), (0, 0)))


class Clips:
    """Keeps the frames of videos; it is a ``Take``."""

    def __init__(self) -> None:
        self._parts: list[list[np.ndarray]] = []

    def __call__(self, video: int, frames: np.ndarray) -> None:
        self._parts += [[] for _ in range(video + 1 - len(self._parts))]
        self._parts[video].append(frames)

    def joined(self, latents: np.ndarray, profile: Profile) -> np.ndarray:
        """Returns the frames of all videos, uint8 (B, F, H, W, 3), and keeps them no more.

        F is 0 if the frames were given to another ``Take``. ``latents`` are those of the videos, (B, ...).
        """
        parts = self._parts or [[] for _ in latents]
        shape = parts[0][0].shape[1:] if parts[0] else (profile.height, profile.width, 3)
        whole = np.empty((len(parts), sum(map(len, parts[0])), *shape), np.uint8)
        for video, own in enumerate(parts):
            first = 0
            while own:
                part = own.pop(0)
                whole[video, first : first + len(part)] = part
                first += len(part)
        return whole


class WindowTake:
    """Passes on the frames of a window that are the video's, of each of several videos; it is a ``Take``.

    It leaves out ``before`` frames in front, which the window before has made, and passes on at most
    ``left``; None for all. ``check`` is called for each piece; what it raises ends the decoding.
    """

    def __init__(self, take: Take, before: int, left: int | None, check: Callable[[], object]) -> None:
        self._take, self._before, self._check = take, before, check
        self._end = None if left is None else before + left
        self._seen = Counter[int]()

    def __call__(self, video: int, frames: np.ndarray) -> None:
        self._check()
        seen = self._seen[video]
        self._seen[video] += len(frames)
        end = None if self._end is None else max(self._end - seen, 0)
        if len(own := frames[max(self._before - seen, 0) : end]):
            self._take(video, own)


class Telling:
    """Calls ``on_frames`` with the frames of videos, of ``total`` frames each; it is a ``Take``.

    If other processes make the same videos (``together``), they need this one to the end: what ``on_frames``
    raises waits for ``finish``, and it is not called again.
    """

    def __init__(
        self, on_frames: OnFrames, total: int, options: Mapping[str, Any], together: bool = False
    ) -> None:
        self._on_frames, self._total, self._options = on_frames, total, options
        self._together, self._firsts = together, Counter[int]()
        self._failed: Exception | None = None

    def __call__(self, video: int, frames: np.ndarray) -> None:
        if self._failed is not None:
            return
        try:
            self._on_frames(Frames(frames, self._firsts[video], self._total, video, self._options))
        except Exception as error:
            if not self._together:
                raise
            self._failed = error
        self._firsts[video] += len(frames)

    def finish(self) -> None:
        """Raises what has waited."""
        if self._failed is not None:
            raise self._failed
