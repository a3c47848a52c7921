"""From noise to frames: one run of the loop, or one a window of a long video, begun where the last ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
from wanrun.generation.decoding import Frames, Telling
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


def test_videos_are_decoded_one_by_one() -> None:
    made = Made(videos=3)
    assert made.frames.shape == (3, LENGTH, 4, 6, 3)
    assert [latents.shape for latents in made.decoded] == [SHAPE[1:]] * 3


@pytest.mark.parametrize("leading", [0, 1, 2])
def test_latents_in_front_of_the_video_are_not_decoded(leading: int) -> None:
    made = Made(leading=leading)
    assert made.decoded[0].shape == SHAPE[1:]
    assert made.latents.shape == (1, 2, 3 + leading, 4, 5)


def test_a_long_video_is_made_window_by_window() -> None:
    """25 frames in windows of 9 that share one: three, and the last frames of each go on."""
    inputs = animate(frames=23, padded=25)
    made = Made(inputs)
    windows = [(asked["window"].start, asked["window"].stop) for asked in made.conditioning.asked]
    assert windows == [(0, 9), (8, 17), (16, 25)]
    first, *later = [asked["carried"] for asked in made.conditioning.asked]
    assert first == {} and all(carried.keys() == {"previous"} for carried in later)
    assert [int(carried["previous"].flat[0]) for carried in later] == [1, 2]
    assert all(asked["inputs"] is inputs for asked in made.conditioning.asked)
    # The shared frame is the first window's, and what was padded is cut.
    assert made.frames[0, :, 0, 0, 0].tolist() == [3] + [1] * 8 + [2] * 8 + [3] * 6
    assert (made.latents == 3).all()  # the last window's
    assert made.told[-1] == (12, 12) and made.told[5] == (5, 12)


def test_the_windows_noise_comes_from_one_generator() -> None:
    """Initial noise, that of the window's steps, the next window's initial noise, and so on."""
    made, noise = Made(animate(17, 17)), Noise(7)
    for start, drawn in zip(made.loop.starts, made.loop.drawn, strict=True):
        assert np.array_equal(start, noise(SHAPE)) and np.array_equal(drawn, noise(SHAPE))
    assert not np.array_equal(*made.loop.starts)


def test_given_latents_are_the_first_window_s() -> None:
    given = np.ones(SHAPE, np.float32)
    made = Made(animate(17, 17), latents=given)
    assert made.loop.starts[0] is given
    assert not np.array_equal(made.loop.starts[1], given)


def test_windows_that_share_five_frames() -> None:
    made = Made(animate(13, 13, overlap=5))
    assert made.frames[0, :, 0, 0, 0].tolist() == [3] + [1] * 8 + [2] * 4


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
