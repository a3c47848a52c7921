"""A denoising step as it is built: the solver's update, guidance, held frames, and the loop over steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.programs import denoiser as denoiser_module
from wanbuild.programs.denoiser import Denoiser, solver_step
from wanrun.denoising.solvers import COLUMNS, HISTORY, solver_table

SHAPE = (1, 2, 3, 4, 5)
Arrays = dict[str, np.ndarray]


def draw(*seeds: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seeds).standard_normal(shape).astype(np.float32)


def updated(x: np.ndarray, v: np.ndarray, history: Arrays, row: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """The recurrence of ``wanrun.denoising.solvers`` in float64, by the names of the columns."""
    c = dict(zip(COLUMNS, row.astype(np.float64), strict=True))
    x, v = x.astype(np.float64), v.astype(np.float64)
    m0 = x - c["sigma"] * v
    m1, m2 = history["m1"], history["m2"]
    last = c["c_x"] * x + c["c_last"] * history["last"] + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
    return c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, {"last": last, "m1": m0, "m2": m1}


def test_a_row_of_any_numbers() -> None:
    """Each column has a number of its own: none is left out, and none taken for another."""
    row = np.linspace(0.3, 1.9, len(COLUMNS), dtype=np.float32)
    history = {name: draw(1, index) for index, name in enumerate(HISTORY)}
    x, v = draw(2), draw(3)
    got, kept = jax.jit(solver_step)(x, v, history, row)
    expected, expected_kept = updated(x, v, history, row)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert kept.keys() == set(HISTORY)
    for name in HISTORY:
        np.testing.assert_allclose(kept[name], expected_kept[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
def test_a_run_over_a_table(solver: str) -> None:
    """Eight steps: float32 on the device stays within roundings of float64."""
    table, step = solver_table(solver, 8, 3.0), jax.jit(solver_step)
    x, history = draw(4), dict.fromkeys(HISTORY, np.zeros(SHAPE, np.float32))
    exact, past = x.astype(np.float64), {name: value.astype(np.float64) for name, value in history.items()}
    for row in table.coefficients:
        x, history = step(x, np.tanh(x), history, row)
        exact, past = updated(exact, np.tanh(exact), past, row)
    assert np.linalg.norm(x - exact) / np.linalg.norm(exact) < 1e-6
    assert np.linalg.norm(exact) > 0.1 * np.linalg.norm(draw(4))


# -- the step around it


class Model:
    """In place of the transformer: v = weights · batch · (prompt - skipped layers) + t / 1000.

    What it was given is noted.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def bind(self, module: object, weights: Any) -> Model:
        self.weights = weights["scale"]
        return self

    def predictor(
        self,
        batch: Any,
        timesteps: Any,
        kv: Any,
        rope: Any,
        condition: Any,
        attention: Any,
        dtype: Any,
        nag: Any,
    ) -> Callable[[Any], jax.Array]:
        self.calls.append({"batch": batch, "timesteps": timesteps, "condition": condition})

        def predict(prompt: Any, skipped: Any = None) -> jax.Array:
            scale = timesteps.reshape(1, 1, -1, 1, 1) / 1000
            own = kv.reshape(-1, 1, 1, 1, 1) if prompt is None else kv[prompt]
            own = own if skipped is None else own - skipped.sum()
            return cast(jax.Array, self.weights * batch * own + scale)

        return predict


@pytest.fixture(params=[False, True])
def halves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the halves of a mesh have a prompt each."""
    if request.param:
        monkeypatch.setattr(denoiser_module, "mesh_sizes", lambda: {"guidance": 2})
    return bool(request.param)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(denoiser_module, "bind", model.bind)
    return model


DENOISER = Denoiser(cast(Any, None), cast(Any, None), jnp.float32)
ROW = solver_table("unipc", 4, 3.0).coefficients[1]
TIMESTEP = np.float32(700)


def step(x: np.ndarray, history: Arrays, kv: list[float], dtype: Any = np.float32, **more: Any) -> Any:
    stored = {name: value.astype(dtype) for name, value in history.items()}
    return DENOISER.step(
        {"scale": jnp.float32(0.5)},
        jnp.asarray(kv),
        None,
        jnp.asarray(x.astype(dtype)),
        stored,
        ROW,
        TIMESTEP,
        **more,
    )


@pytest.fixture
def history() -> Arrays:
    return {name: draw(5, index) for index, name in enumerate(HISTORY)}


def test_a_step_without_guidance(model: Model, history: Arrays) -> None:
    x = draw(6)
    expected, kept = updated(x, 0.5 * x * 3 + 0.7, history, ROW)
    state = step(x, history, [3.0])
    np.testing.assert_allclose(state["latents"], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state["history"]["m1"], kept["m1"], rtol=0, atol=1e-5)
    (call,) = model.calls
    assert call["batch"].shape == SHAPE and call["timesteps"].tolist() == [[700.0]]


@pytest.mark.slow
def test_guidance(model: Model, history: Arrays, halves: bool) -> None:
    """The positive prompt comes first: v = u + scale · (c - u). Halves of a mesh have a doubled batch."""
    x, positive, negative = draw(7), 3.0, -1.0
    c, u = (0.5 * x * factor + 0.7 for factor in (positive, negative))
    expected, _ = updated(x, u + 4.0 * (c - u), history, ROW)
    state = step(x, history, [positive, negative], guidance_scale=np.float32(4))
    np.testing.assert_allclose(state["latents"], expected, rtol=0, atol=3e-5)
    (call,) = model.calls
    assert call["batch"].shape == (1 + halves, *SHAPE[1:])


@pytest.mark.slow
@pytest.mark.parametrize("skip_scale", [0.0, 2.5])
def test_guiders(model: Model, history: Arrays, halves: bool, skip_scale: float) -> None:
    """The negative pass is projected, and velocities are led away from a pass that skips two layers."""
    x, positive, negative = draw(7), 3.0, -1.0
    c, u, skipped = (0.5 * x * factor + 0.7 for factor in (positive, negative, positive - 2))
    u = np.sum(c * u) / np.sum(u * u) * u
    expected, _ = updated(x, u + 4.0 * (c - u) + skip_scale * (c - skipped), history, ROW)
    scales = {"guidance_scale": 4, "guidance_projection": 1, "skip_scale": skip_scale}
    given = {name: np.float32(value) for name, value in scales.items()}
    state = step(x, history, [positive, negative], **given, skip_layers=np.float32([0, 1, 1]))
    np.testing.assert_allclose(state["latents"], expected, rtol=0, atol=3e-5)


def test_a_scale_of_one_reads_no_second_prompt(model: Model, history: Arrays, halves: bool) -> None:
    """Its keys may be of nothing: NaN does not arrive."""
    x = draw(7)
    state = step(x, history, [3.0, np.nan], guidance_scale=np.float32(1))
    expected = step(x, history, [3.0])
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_held_frame_has_its_own_latents_and_timestep(model: Model, history: Arrays) -> None:
    x, first = draw(8), draw(9, shape=(2, 1, 4, 5))
    mask = np.array([0, 1, 1], np.float32)
    step(x, history, [1.0], condition={"first_frame": first, "other": 1}, frame_mask=jnp.asarray(mask))
    (call,) = model.calls
    np.testing.assert_array_equal(call["batch"][0, :, :1], first)
    np.testing.assert_array_equal(call["batch"][0, :, 1:], x[0, :, 1:])
    assert call["timesteps"].tolist() == [[0.0, 700.0, 700.0]]
    assert call["condition"] == {"other": 1}


def test_the_scale_of_control_blocks_is_a_part_of_the_condition(model: Model, history: Arrays) -> None:
    step(draw(1), history, [1.0], condition={"control": 2}, conditioning_scale=jnp.ones(3))
    (call,) = model.calls
    assert call["condition"]["control"] == 2 and call["condition"]["scale"].tolist() == [1, 1, 1]


def test_the_state_keeps_its_dtype_and_is_computed_in_float32(model: Model, history: Arrays) -> None:
    x = draw(10)
    state = step(x, history, [1.0], dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(state)
    assert len(leaves) == 1 + len(HISTORY) and {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    (call,) = model.calls
    assert call["batch"].dtype == jnp.float32
    rounded, past = (
        x.astype(jnp.bfloat16).astype(np.float32),
        {name: value.astype(jnp.bfloat16).astype(np.float32) for name, value in history.items()},
    )
    expected, _ = updated(rounded, 0.5 * rounded + 0.7, past, ROW)
    error = np.abs(state["latents"].astype(np.float32) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 1e-5).all()  # one rounding


@pytest.mark.slow
def test_the_loop_is_its_steps(model: Model, history: Arrays) -> None:
    table, x = solver_table("dpm++", 5, 3.0), jnp.asarray(draw(11))
    state: dict[str, Any] = {"latents": x, "history": history}
    constant: dict[str, Any] = {
        "transformer": {"scale": jnp.float32(0.5)},
        "kv": jnp.array([1.0, -0.5]),
        "rope": None,
    }
    scales = np.array([9, 3, 1, 2, 9, np.nan, np.nan], np.float32)
    for row, timestep, scale in list(zip(table.coefficients, table.timesteps, scales, strict=False))[1:4]:
        own = {"coefficients": row, "timestep": timestep, "guidance_scale": scale}
        state = DENOISER.step(**constant, **state, **own)
    padded = np.concatenate([table.coefficients, np.full((2, len(COLUMNS)), np.nan, np.float32)])
    times = np.concatenate([table.timesteps, np.full(2, np.nan, np.float32)])
    tables = {"coefficients": padded, "timesteps": times, "guidance_scales": scales}
    given = {name: jnp.asarray(one) for name, one in tables.items()}
    loop = DENOISER.loop(x, history, np.int32(1), np.int32(4), **given, **constant)
    for one, other in zip(jax.tree.leaves(loop), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
