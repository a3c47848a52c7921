"""Frames of latents, piece by piece: which calls are made, and which of their frames are the video's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.fake_programs import FakeProgram, FakePrograms
from wanrun.generation.decoding import Clips, Frames, LatentDecoder, Telling

SIZE = 2
"""Latent frames of a piece."""


def decoder(
    alike: bool, check: Callable[[], object] = lambda: None
) -> tuple[LatentDecoder, list[tuple[int, int]]]:
    """A decoder that repeats a latent frame four times, and what its pieces were told: first, and state."""
    told = list[tuple[int, int]]()

    def begin(latents: np.ndarray) -> dict[str, Any]:
        return {"frames": latents[0, :, :, :, None].astype(np.uint8), "past": np.ones(1, np.float32)}

    def following(latents: np.ndarray, past: Any, first: np.int32) -> dict[str, Any]:
        assert latents.shape == (1, SIZE, 1, 1)
        told.append((int(first), int(past[0])))
        frames = np.repeat(latents[0], 4, 0)[..., None].astype(np.uint8)
        return {"frames": frames, "past": past + 1}

    arrays = {"latents": ("float32", (1, SIZE, 1, 1)), "past": ("float32", (1,))}
    last = FakeProgram(("vae", "latents", "past"), arrays, following, role="decode", donated=("past",))
    programs = {"decode_video": last}
    if not alike:
        programs["decode_first"] = FakeProgram(("vae", "latents"), compute=begin, role="decode_first")
    return LatentDecoder(cast(Any, FakePrograms(**programs)), check=check), told


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3, 6])
def test_a_video_of_any_length(frames: int, alike: bool) -> None:
    decode, told = decoder(alike)
    latents = np.arange(1, frames + 1, dtype=np.float32).reshape(1, -1, 1, 1)
    for _ in range(2):  # each video begins anew
        made = [piece[:, 0, 0, 0].tolist() for piece in decode(latents)]
        assert made[0] == [1] and [*chain(*made)] == [1, *np.repeat(range(2, frames + 1), 4)]
        count = frames // SIZE
        assert told == ([(1, 0)] if alike else []) + [(0, number + 1) for number in range(count)]
        told.clear()
    assert decode.enough == 2


def test_a_decoding_ends_between_two_pieces() -> None:
    allowed = iter([None, None])
    decode, told = decoder(alike=True, check=lambda: next(allowed))
    with pytest.raises(RuntimeError):  # a generator's StopIteration
        list(decode(np.ones((1, 9, 1, 1), np.float32)))
    assert len(told) == 3


def test_frames_that_are_kept_or_told_of() -> None:
    video, heard, clips = np.arange(10, dtype=np.uint8).reshape(2, 5, 1, 1, 1), list[Frames](), Clips()
    tell = Telling(heard.append, 5, {"seed": 3})
    for number, frames in enumerate(video):
        for part in (slice(0, 1), slice(1, 5)):
            tell(number, frames[part])
            clips(number, frames[part])
    assert [(one.video, one.first, len(one.frames)) for one in heard] == [
        (0, 0, 1),
        (0, 1, 4),
        (1, 0, 1),
        (1, 1, 4),
    ]
    assert all(one.total == 5 and one.options == {"seed": 3} for one in heard)
    profile: Any = SimpleNamespace(width=3, height=2)
    assert np.array_equal(clips.joined(video, profile), video)
    assert clips.joined(video, profile).shape == (2, 0, 2, 3, 3)


def test_one_of_several_processes_fails_after_the_last_frame() -> None:
    """The others wait for it in their programs."""

    def full(made: Frames) -> None:
        heard.append(made.first)
        raise InterruptedError

    heard, frames = list[int](), np.zeros((2, 1, 1, 3), np.uint8)
    with pytest.raises(InterruptedError):
        Telling(full, 4, {})(0, frames)
    tell = Telling(full, 4, {}, together=True)
    tell(0, frames)
    tell(0, frames)
    assert heard == [0, 0]
    with pytest.raises(InterruptedError):
        tell.finish()
