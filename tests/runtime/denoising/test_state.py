"""The state of the denoising loop, derived from the records of its programs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.refusals import refuses
from wanrun.artifact.programs import Program
from wanrun.denoising.state import check_finite, final_latents, start_state
from wanrun.errors import WanError

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
