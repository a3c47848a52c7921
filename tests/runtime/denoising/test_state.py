"""Latents: noise, what a run begins and ends with, and what a video goes on from."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import plain_manifest, with_model
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanrun.artifact.programs import Program
from wanrun.denoising import noise
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.latents import check_latents, latents_shape
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.past import LEAST, MOST, Given, Latents
from wanrun.denoising.pyramid import block_noise, chunk_table, enlarged, halved
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.state import check_finite, final_latents, start_state
from wanrun.errors import UsageError, WanError

# --- state ---


NOISE = np.random.default_rng(0).standard_normal((1, 2, 3, 4, 5)).astype(np.float32)


def record(donated: dict[str, Any], **others: Any) -> Program:
    """A program that takes ``others`` before what is donated to it."""
    inputs = {**others, **donated}
    donate = tuple(range(len(others), len(inputs)))
    avals = {"inputs": inputs, "outputs": donated}
    return Program("file", "sha256", tuple(inputs), donate, avals, "step")


def latents(dtype: str = "float32") -> str:
    return f"{dtype}[1,2,3,4,5]"


def test_the_donated_inputs_are_the_state() -> None:
    history = {"last": latents(), "m1": latents()}
    step = record({"latents": latents(), "history": history}, timestep="float32[]", kv="bfloat16[2,3]")
    state = start_state(NOISE, step)
    assert state.keys() == {"latents", "history"} and state["history"].keys() == {"last", "m1"}
    assert np.array_equal(state["latents"], NOISE) and state["latents"].dtype == np.float32
    for array in state["history"].values():
        assert array.shape == NOISE.shape and array.dtype == np.float32 and not array.any()


def test_state_may_be_nested() -> None:
    cache = {"blocks": {"residual": "bfloat16[2,7]", "age": "int32[]"}}
    state = start_state(NOISE, record({"latents": latents(), "cache": cache}))
    residual, age = state["cache"]["blocks"]["residual"], state["cache"]["blocks"]["age"]
    assert (residual.shape, residual.dtype) == ((2, 7), ml_dtypes.bfloat16)
    assert (age.shape, age.dtype) == ((), np.int32)


def test_latents_take_the_programs_dtype() -> None:
    state = start_state(NOISE, record({"latents": latents("bfloat16"), "history": latents("bfloat16")}))
    assert state["latents"].dtype == state["history"].dtype == ml_dtypes.bfloat16
    final = final_latents(state)
    assert final.dtype == np.float32
    np.testing.assert_allclose(final, NOISE, rtol=2**-8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(value: float) -> None:
    wrong = NOISE.copy()
    wrong[0, 1, 2, 3, 4] = value
    with refuses("not_finite", WanError, what="after 3 steps", found="1 NaN") as caught:
        check_finite({"latents": wrong}, "after 3 steps")
    assert " 120 " in str(caught.value.found)
    with refuses("not_finite", WanError, what="end"):
        final_latents({"latents": wrong})
    check_finite({"latents": NOISE}, "ever")


# --- conditions ---


def test_without_a_held_frame_the_latents_are_the_result() -> None:
    latents = np.ones((1, 2, 3, 4, 5), np.float32)
    assert Conditions().finish(latents) is latents


def test_a_held_frame_is_in_its_place_of_every_video() -> None:
    latents, held = np.zeros((2, 3, 4, 2, 2), np.float32), np.full((3, 1, 2, 2), 7, np.float32)
    finished = Conditions(held=held).finish(latents)
    assert (finished[:, :, 0] == 7).all() and (finished[:, :, 1:] == 0).all()
    assert not latents.any()  # what was given is not changed


def test_the_first_sample_is_noise_or_a_video_with_noise() -> None:
    """With what weight the noise alone begins, a solver says; of every video of the batch."""
    noise, video = np.full((2, 3, 4, 2, 2), 2, np.float32), np.full((3, 4, 2, 2), 10, np.float32)
    table = solver_table("rcm-ode", 4, 1.0, timesteps=(900, 500, 400), strength=0.5)
    assert (Conditions().first_sample(noise, table) == np.float32(0.5) * 2).all()
    sample = Conditions(start=video).first_sample(noise, table)
    assert sample.dtype == np.float32 and sample.shape == noise.shape and (sample == 6).all()


# --- latents ---


@pytest.mark.parametrize(
    ("extra", "references", "frames"), [({}, 0, 3), ({"leading_latents": 1}, 0, 4), ({}, 2, 5)]
)
def test_the_latents_of_a_profile(extra: dict[str, Any], references: int, frames: int) -> None:
    profile = structs.replace(PROFILE, num_videos=2, num_references=references)
    assert latents_shape(with_model(plain_manifest(), **extra), profile) == (2, 16, frames, 8, 12)


@pytest.mark.parametrize(
    "given", [np.zeros((1, 2), np.float16), np.zeros((2, 1), np.float32), np.full((1, 2), np.nan, np.float32)]
)
def test_latents_that_do_not_fit(given: np.ndarray) -> None:
    check_latents(np.zeros((1, 2), np.float32), (1, 2))
    with pytest.raises(UsageError):
        check_latents(given, (1, 2))


# --- noise ---


RECORDED = (
    (42, (5,), "0.336690366 0.128809407 0.234462366 0.23033303 -1.12285638"),
    (
        2**63,
        (17,),  # one more than torch draws at once
        "-1.12583983 -1.6959312 0.566650629 0.793508351 0.598839462 -1.55509508 -0.34136039 1.85300612 "
        "0.468096405 -0.585497558 -0.173396751 0.183477938 1.38936615 1.58633423 0.946298361 -0.843676746 "
        "0.931826591",
    ),
    (
        7,
        (1, 2, 1, 2, 4),
        "-0.820134521 0.395631164 0.898908496 -1.38840389 -0.166996017 0.285149962 -0.641091526 -0.893655419 "
        "0.926542997 -0.535512209 -1.1597203 -0.460157156 0.708539069 1.01275539 0.230396867 1.09016514",
    ),
)
"""Seeds, shapes, and values of ``torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))`` of
torch 2.13. Parity compares many more."""


@pytest.mark.parametrize(("seed", "shape", "values"), [*RECORDED, (1, (2, 0, 3), "")])
def test_values_of_torch(seed: int, shape: tuple[int, ...], values: str) -> None:
    got = initial_noise(seed, shape)
    assert got.shape == shape and got.dtype == np.float32
    np.testing.assert_allclose(got.ravel(), np.array(values.split(), float), rtol=0, atol=1e-6)


def test_the_bits_are_the_same_everywhere() -> None:
    """Only IEEE-exact operations are used, so that this digest holds on any machine."""
    data = initial_noise(2024, (3, 1000)).astype("<f4").tobytes() + initial_noise(5, (9,)).tobytes()
    assert (
        hashlib.sha256(data).hexdigest() == "244df6368d2a4b5263e0b835b4b1275c09ebd8a11afa4ae7f98d6e1638ce67f7"
    )


def test_is_standard_normal_and_depends_on_the_seed() -> None:
    a, b = initial_noise(3, (200_000,)), initial_noise(4, (200_000,))
    # Standard errors: 2.2e-3 of the mean and of the correlation, 1.6e-3 of the deviation; five of them.
    assert abs(a.mean()) < 0.011
    assert abs(a.std() - 1) < 0.008
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.011


def test_elementary_functions() -> None:
    """To the last bits of float64, of which few reach a value's float32."""
    random = np.random.default_rng(0)
    uniform = np.concatenate([1 - random.integers(0, 2**24, 100_000) * 2.0**-24, [1.0, 2.0**-53, 0.5]])
    # 1.8e-15 is the spacing of float64 between 8 and 16; logarithms reach 17 (24 bits) and 37 (53 bits).
    np.testing.assert_allclose(noise._log(uniform), np.log(uniform), rtol=4e-16, atol=4e-16)
    angle = np.concatenate([random.uniform(0, 2 * math.pi, 100_000), np.arange(9) * math.pi / 4])
    sine, cosine = noise._sin_cos(angle)
    np.testing.assert_allclose(sine, np.sin(angle), rtol=0, atol=1e-15)
    np.testing.assert_allclose(cosine, np.cos(angle), rtol=0, atol=1e-15)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refuses_a_seed_out_of_range(seed: int) -> None:
    with refuses("out_of_range", what="seed", expected="2**64 - 1", found=seed):
        initial_noise(seed, (4,))


# --- past ---


FRAMES = 19


def sure(value: float, frames: int) -> Latents:
    """A distribution of one value."""
    mean = np.full((1, 4, frames, 6, 8), value, np.float32)
    return Latents(mean, np.zeros_like(mean))


def sizes(latents: np.ndarray, value: float) -> np.ndarray:
    """The size of the noise of each latent frame, by the mean of what is left of a large value."""
    return 1 - latents.mean(axis=(0, 1, 3, 4)) / value


def test_an_image_is_the_first_and_the_last_frame() -> None:
    past = Given(sure(1e4, 1), [sure(2e4, 9)], 0, True, FRAMES).past(Noise(1))
    assert past.first.dtype == past.past.dtype == np.float32
    assert past.past.shape == (1, 4, FRAMES, 6, 8) and not past.past[:, :, :-1].any()
    found = np.concatenate([sizes(past.first, 1e4), sizes(past.past[:, :, -1:], 2e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == 2


def test_each_frame_of_a_video_has_noise_of_its_own_size() -> None:
    chunks = [sure(1e4, 9), sure(2e4, 9), sure(1e4, 9)]
    past = Given(sure(3e4, 1), chunks, 0, False, FRAMES).past(Noise(2))
    assert LEAST < sizes(past.first, 3e4)[0] < MOST
    found = np.concatenate([sizes(past.past[:, :, 1:10], 2e4), sizes(past.past[:, :, 10:], 1e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == FRAMES - 1


def test_chunks_that_are_left_out_are_drawn_for() -> None:
    """The noise of those that count is the same, whether the ones before them are encoded or not."""
    chunks = [sure(value, 9) for value in (4e4, 1e4, 2e4, 1e4)]
    every, last = (
        Given(sure(3e4, 1), chunks[before:], before, False, FRAMES).past(Noise(2)) for before in (0, 1)
    )
    np.testing.assert_array_equal(every.past, last.past)
    np.testing.assert_array_equal(every.first, last.first)


# --- pyramid ---


SHAPE = (1, 8, 3, 16, 24)


@pytest.mark.parametrize("gamma", [1 / 3, 0.2])
def test_noise_of_a_stage_is_as_good_as_new(gamma: float) -> None:
    """Enlarged noise and block noise have together the variance of noise, and no covariance in a block."""
    draw = Noise(3)
    _, start, _ = chunk_table("unipc", (2, 1, 1), 432, gamma=gamma).starts
    assert start.step == 2
    level = start.noise * np.sqrt(gamma) / start.kept  # of the noise at which the stage begins
    found = enlarged(np.float32(level) * draw((*SHAPE[:-2], 8, 12)), start, draw, gamma)
    blocks = np.swapaxes(found.reshape(*SHAPE[:-2], 8, 2, 12, 2), -3, -2).reshape(-1, 4)
    assert found.shape == SHAPE and found.dtype == np.float32
    covariance = np.cov(blocks.T) / np.var(blocks)
    assert np.abs(covariance - np.eye(4)).max() < 0.06  # seen: 0.03, of 2 304 blocks


def test_block_noise_at_the_published_gamma() -> None:
    """A block's values are nearly a sum of 0: the last of them is not drawn freely."""
    noise = block_noise(Noise(4), SHAPE)
    assert abs(noise.var() - 1) < 0.05
    assert np.abs(noise.reshape(*SHAPE[:-2], 8, 2, 12, 2).sum(axis=(-3, -1))).max() < 2e-4 * 5


def test_halved_noise_is_noise() -> None:
    half = halved(Noise(5)(SHAPE))
    assert half.shape == (*SHAPE[:-2], 8, 12) and half.dtype == np.float32
    assert abs(half.var() - 1) < 0.06


@pytest.mark.parametrize(
    ("solver", "steps", "found"), [("lcm", (2, 2), "'lcm'"), ("dmd", (2, 0, 2), "at least 1; found 0")]
)
def test_what_has_no_steps(solver: str, steps: tuple[int, ...], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        chunk_table(solver, steps, 432)
