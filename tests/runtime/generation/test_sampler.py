"""From noise to frames: a run of the loop, or one for each window; frames of latents, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.fake_programs import FakeProgram, FakePrograms
from helpers.manifests import plain_manifest, plain_model
from helpers.media_files import task_of
from helpers.options import options as resolved
from wanrun.denoising.blending import Blending
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.steps import Denoising
from wanrun.generation.decoding import Clips, Frames, LatentDecoder, Telling
from wanrun.generation.sampler import Draw, Sampler
from wanrun.generation.video_parts import Spool, VideoParts
from wanrun.media.inputs import Inputs
from wanrun.timing.timings import Timings

SHAPE = (1, 2, 3, 4, 5)
RESOLVED = resolved(seed=7)
LENGTH = 9
"""Frames of a window."""


def decode(latents: np.ndarray) -> dict[str, np.ndarray]:
    """Frames that have the latents' last value, and the number of latent frames in the first."""
    frames = np.full((LENGTH, 4, 6, 3), int(latents.flat[-1]), np.uint8)
    frames[0] = latents.shape[1]
    return {"frames": frames, "last_frames": np.full((5, 4, 6, 3), latents.flat[-1], np.float32)}


class Loop:
    """In place of the denoising loop: the latents are the number of the window everywhere.

    Attributes:
        starts: the initial noise of each window.
        drawn: the noise that each window took for its steps.
    """

    def __init__(self, steps: int = 4) -> None:
        self.steps = steps
        self.starts: list[np.ndarray] = []
        self.drawn: list[np.ndarray] = []

    def __call__(self, run: Denoising, start: np.ndarray, conditions: Conditions, draw: Draw) -> np.ndarray:
        self.starts.append(start)
        self.drawn.append(draw(start.shape))
        for done in range(1, self.steps + 1):
            run.on_step(*run.reached(done))
        return np.full(start.shape, len(self.starts), np.float32)


class Conditioning:
    """In place of what encodes images and videos: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, inputs: Inputs | None, **options: Any) -> Conditions:
        self.asked.append({"inputs": inputs, **options})
        return Conditions()


class Made:
    """One run of a sampler, with what was seen of it."""

    def __init__(
        self,
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        leading: int = 0,
        videos: int = 1,
        after: Mapping[str, Callable[..., Mapping[str, Any]]] = MappingProxyType({"decode_video": decode}),
        blending: Blending | None = None,
        parts: VideoParts | None = None,
        **options: Any,
    ) -> None:
        compute = {
            name: FakeProgram(("vae", "latents"), compute=program, role="decode", place=place)
            for place, (name, program) in enumerate(after.items())
        }
        programs = FakePrograms(**compute)
        task = task_of("wan2.1-t2v" if inputs is None else "wan2.2-animate", encoder=False)
        model = plain_model(
            vae_temporal=4, vae_spatial=8, latent_channels=2, leading_latents=leading, task=task
        )
        shape = {"width": 40, "height": 32, "num_frames": LENGTH, "num_videos": videos, "num_references": 0}
        profile = SimpleNamespace(**shape, options=SimpleNamespace(guiders=()))
        self.loop, self.conditioning, self.told = Loop(), Conditioning(), [(0, 0)]
        manifest = plain_manifest(model=model)
        sampler = Sampler(*map(cast_any, (programs, manifest, profile, self.conditioning)))
        sampler.denoise = self.loop  # type: ignore[method-assign]

        def on_step(done: int, total: int) -> None:
            self.told.append((done, total))

        table = SimpleNamespace(timesteps=np.zeros(self.loop.steps))
        run = Denoising(cast(Any, table), (), np.zeros(0), "step", Timings(), on_step=on_step)
        run = replace(run, blending=blending)
        with parts or VideoParts() as parts:
            self.frames, self.latents = sampler(run, {**RESOLVED, **options}, inputs, latents, parts)
        self.called = programs.names
        self.decoded = [arguments["latents"] for name, arguments in programs.calls]


def cast_any(value: object) -> Any:
    return value


def animate(frames: int, padded: int, overlap: int = 1) -> Inputs:
    video = np.zeros((padded, 4, 6, 3), np.uint8)
    return Inputs({"pose_video": video}, num_frames=frames, segment_overlap=overlap)


def test_text_alone_is_one_run() -> None:
    made = Made()
    assert made.frames.shape == (1, LENGTH, 4, 6, 3) and made.frames.dtype == np.uint8
    assert np.array_equal(made.loop.starts[0], Noise(7)(SHAPE))
    assert (made.latents == 1).all()
    assert made.told == [(0, 0), (1, 4), (2, 4), (3, 4), (4, 4)]
    (asked,) = made.conditioning.asked
    assert (asked["inputs"], asked["window"], asked["carried"]) == (None, None, {})


@pytest.mark.parametrize(("videos", "leading"), [(3, 0), (1, 1), (1, 2)])
def test_each_video_is_decoded_without_the_latents_in_front_of_it(videos: int, leading: int) -> None:
    made = Made(videos=videos, leading=leading)
    assert made.frames.shape == (videos, LENGTH, 4, 6, 3)
    assert [latents.shape for latents in made.decoded] == [SHAPE[1:]] * videos
    assert made.latents.shape == (videos, 2, 3 + leading, 4, 5)


@pytest.mark.parametrize(
    ("inputs", "windows", "frames"),
    [  # the shared frames are the earlier window's, and what was padded is cut
        ((23, 25, 1), [(0, 9), (8, 17), (16, 25)], [3] + [1] * 8 + [2] * 8 + [3] * 6),
        ((13, 13, 5), [(0, 9), (4, 13)], [3] + [1] * 8 + [2] * 4),
    ],
)
def test_a_long_video_is_made_window_by_window(
    inputs: tuple[int, int, int], windows: list[tuple[int, int]], frames: list[int]
) -> None:
    """Of 9 frames each; the last frames of each go on."""
    given = animate(*inputs)
    made = Made(given)
    assert [(asked["window"].start, asked["window"].stop) for asked in made.conditioning.asked] == windows
    first, *later = [asked["carried"] for asked in made.conditioning.asked]
    assert first == {} and all(carried.keys() == {"previous"} for carried in later)
    assert [int(carried["previous"].flat[0]) for carried in later] == [*range(1, len(windows))]
    assert all(asked["inputs"] is given for asked in made.conditioning.asked)
    assert made.frames[0, :, 0, 0, 0].tolist() == frames
    assert (made.latents == len(windows)).all()  # the last window's
    steps = 4 * len(windows)
    assert made.told[-1] == (steps, steps) and made.told[5] == (5, steps)


def test_the_windows_noise_comes_from_one_generator() -> None:
    """Initial noise, that of the window's steps, the next window's initial noise, and so on."""
    made, noise = Made(animate(17, 17)), Noise(7)
    for start, drawn in zip(made.loop.starts, made.loop.drawn, strict=True):
        assert np.array_equal(start, noise(SHAPE)) and np.array_equal(drawn, noise(SHAPE))
    assert not np.array_equal(*made.loop.starts)
    given = np.ones(SHAPE, np.float32)
    first, second = Made(animate(17, 17), latents=given).loop.starts
    assert first is given and not np.array_equal(second, given)


def test_windows_that_are_blended_of_several_videos() -> None:
    """Each video has all of its frames, in order; the shared one is the first window's."""
    heard = list[Frames]()
    for parts in (None, VideoParts(Telling(heard.append, 17, {}))):
        made = Made(videos=2, blending=Blending(5, 3, 1), parts=parts)
        assert made.loop.starts[0].shape == (2, 2, 5, 4, 5) and len(made.loop.starts) == 1
        assert made.frames.shape[:2] == (2, 0 if heard else 17)
    assert [(one.video, one.first, len(one.frames)) for one in heard] == [
        (0, 0, 9),
        (1, 0, 9),
        (0, 9, 8),
        (1, 9, 8),
    ]


def test_steps_of_windows_are_not_made_again_after_an_end_of_the_decoding(tmp_path: Path) -> None:
    windows, whole = Blending(5, 3, 1), Made(blending=Blending(5, 3, 1))

    def full(latents: np.ndarray) -> dict[str, np.ndarray]:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Made(blending=windows, parts=Spool(tmp_path / "o", "key", (4, 6)), after={"decode_video": full})
    again = Made(blending=windows, parts=Spool(tmp_path / "o", "key", (4, 6)))
    assert not again.loop.starts
    assert np.array_equal(again.frames, whole.frames) and np.array_equal(again.latents, whole.latents)


@pytest.mark.parametrize("options", [{}, {"conditioning_scale": 0.5}])
def test_the_options_are_passed_on(options: dict[str, Any]) -> None:
    """All of them: which ones the steps take, the conditioning knows, and their defaults."""
    for inputs, windows in ((None, 1), (animate(17, 17), 2)):
        asked = Made(inputs, **options).conditioning.asked
        assert [one["options"] for one in asked] == [{**RESOLVED, **options}] * windows
    (asked,) = Made(blending=Blending(5, 3, 1), **options).conditioning.asked
    assert asked["options"] == {**RESOLVED, **options}


def test_the_programs_after_the_loop_run_in_their_order() -> None:
    """Each takes what those before it have made, for each video anew."""

    def shift(latents: np.ndarray) -> dict[str, np.ndarray]:
        return {"shifted": latents + 4}

    def decode_shifted(latents: np.ndarray, shifted: np.ndarray) -> dict[str, np.ndarray]:
        assert np.array_equal(shifted, latents + 4)
        return decode(shifted)

    made = Made(videos=2, after={"shift": shift, "decode_video": decode_shifted})
    assert made.called == ["shift", "decode_video"] * 2
    assert made.frames.shape == (2, LENGTH, 4, 6, 3)
    assert (made.frames[:, 1:] == 5).all()  # the latents are 1


# Frames of latents.


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
