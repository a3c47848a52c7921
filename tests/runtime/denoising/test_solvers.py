"""Solver tables: their layout and grids, what is refused, and flows whose exact solution is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancli.run import wanrun
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, SOLVERS, SolverTable, solver_table
from wanrun.denoising.state import with_noise
from wanrun.errors import UsageError

LIGHTNING = (1000, 937.5, 833.33, 625)
"""The published timesteps of a distilled model: shift 5, four steps."""

FALLING = "cannot be used; expected at most 1000, above 0, each below the one before in float32; found "

Velocity = Callable[[np.ndarray, float], np.ndarray]


def run(table: SolverTable, x: np.ndarray, velocity: Velocity) -> np.ndarray:
    """The recurrence of wanrun.denoising.solvers in float64; noise is seed 0's."""
    draw = Noise(0)
    last = m1 = m2 = np.zeros_like(x)
    for row, weight in zip(table.coefficients.astype(np.float64), table.noise, strict=True):
        c = dict(zip(COLUMNS, row, strict=True))
        m0 = x - c["sigma"] * velocity(x, c["sigma"])
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
        if weight:
            x = with_noise(x, weight, draw(x.shape))
    return x


@pytest.mark.parametrize("timesteps", [None, LIGHTNING, (999,), (500, 20)])
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_data_of_one_point_is_found(name: str, timesteps: tuple[float, ...] | None) -> None:
    """Every prediction of the clean sample is then that point, and so is the end, whatever comes between."""
    point, start = np.array([0.3, -1.2, 0.7]), np.array([1.0, 0.1, -2.0])
    table = solver_table(name, 6, 5.0, 1000, timesteps)
    end = run(table, start, lambda x, sigma: (x - point) / sigma)
    np.testing.assert_allclose(end, point, rtol=0, atol=1e-6)


def test_the_flow_of_a_gaussian() -> None:
    """From normal data of deviation s the flow takes x to x·s/sqrt(V), V the variance at the first sigma."""
    s = 0.5

    def variance(sigma: float) -> float:
        return (1 - sigma) ** 2 * s**2 + sigma**2

    def error(name: str, num_steps: int) -> float:
        table = solver_table(name, num_steps, 1.0)
        end = run(table, np.ones(1), lambda x, sigma: x * (sigma - (1 - sigma) * s**2) / variance(sigma))
        return abs(float(end[0]) - s / math.sqrt(variance(table.sigmas[0])))

    assert 1.9 < error("euler", 40) / error("euler", 80) < 2.1  # first order
    for name in ("unipc", "dpm++"):
        assert error(name, 80) < error("euler", 80) / 8  # seen: 42 and 11 times nearer


def test_the_command_line_offers_every_solver() -> None:
    (option,) = (item for item in wanrun.params if item.name == "solver")
    assert isinstance(option.type, click.Choice) and list(option.type.choices) == list(SOLVERS)


@pytest.mark.parametrize(("name", "same"), [("rcm-ode", "euler"), ("rcm-sde", "lcm")])
def test_rcm_differs_in_its_start(name: str, same: str) -> None:
    """diffusers has no class for them: their tables are those of solvers that it has."""
    for timesteps in (None, (987.65, 933.78, 852.9, 608.98)):
        found, other = (solver_table(one, 4, 5.0, timesteps=timesteps) for one in (name, same))
        for values in ("timesteps", "coefficients", "sigmas", "noise"):
            np.testing.assert_array_equal(getattr(found, values), getattr(other, values))
        assert other.start == 1 and found.start == found.sigmas[0]


@pytest.mark.parametrize(("shift", "train"), [(1.0, 1000), (5.0, 1000), (8.0, 1000), (8.0, 500), (0.5, 1000)])
def test_dmd_takes_the_nearest_level_of_training(shift: float, train: int) -> None:
    """The model is given the timestep itself."""
    u = np.arange(train, 0, -1) / train
    levels = shift * u / (1 + (shift - 1) * u)
    timesteps = np.linspace(train, 40, 12).round(1)
    nearest = [levels[np.abs(levels - timestep / train).argmin()] for timestep in timesteps]
    table = solver_table("dmd", 1, shift, train, timesteps.tolist())
    check_layout(table, "dmd", 12)
    np.testing.assert_array_equal(table.timesteps, timesteps.astype(np.float32))
    np.testing.assert_array_equal(table.sigmas[:-1], np.float32(nearest))


def test_lcm_is_a_prediction_and_noise() -> None:
    table = solver_table("lcm", 4, 5.0)
    np.testing.assert_array_equal(table.noise, table.sigmas[1:].astype(np.float32))
    assert table.noise[-1] == 0 and (table.noise[:-1] > 0).all()
    x, v, history = np.array([0.5]), np.array([2.0]), (np.array([9.0]),) * 3
    for row, following in zip(table.coefficients.astype(np.float64), table.sigmas[1:], strict=True):
        c = dict(zip(COLUMNS, row, strict=True))
        m0 = x - c["sigma"] * v
        terms = zip(("c_last", "c_1", "c_2"), history, strict=True)
        last = c["c_x"] * x + c["c_0"] * m0 + sum(c[name] * past for name, past in terms)
        found = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * history[1]
        np.testing.assert_allclose(found, (1 - following) * m0, rtol=1e-6)


def test_self_forcing_as_published() -> None:
    """Places 1000, 750, 500 and 250 of a grid; each prediction is made noisy for the next step."""
    grid = np.linspace(1, 0, 1001)[:-1]
    grid = np.float32(5 * grid / (1 + 4 * grid))
    levels = grid[[1000 - place for place in (1000, 750, 500, 250)]]
    table = solver_table("self-forcing", 4, 5.0)
    np.testing.assert_array_equal(table.timesteps, np.float32(1000 * levels.astype(np.float64)))
    random = np.random.default_rng(7)
    draws = random.standard_normal((4, 3, 5)).astype(np.float32)
    x = expected = draws[0]
    for index, row in enumerate(table.coefficients):
        v = random.standard_normal(x.shape).astype(np.float32)
        clean = expected - levels[index] * v
        following = levels[index + 1] if index < 3 else np.float32(0)
        expected = (1 - following) * clean + following * draws[(index + 1) % 4]
        c = dict(zip(COLUMNS, row, strict=True))
        x = with_noise(c["p_0"] * (x - c["sigma"] * v), table.noise[index], draws[(index + 1) % 4])
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(clean, expected)
    assert [table.noise_after(index) for index in range(4)] == [*levels[1:], None]


@pytest.mark.parametrize(
    ("name", "timesteps"),
    [
        ("unipc", [999, 937, 833, 625]),
        ("dpm++", [999, 937, 833, 624]),
        ("euler", [1000.0, 909.7, 717.3, 24.4]),
        ("lcm", [1000.0, 909.7, 717.3, 24.4]),
    ],
)
def test_grids_of_four_steps(name: str, timesteps: list[float]) -> None:
    """No solver but those of few steps adds noise."""
    tables = solver_table(name, 4, 5.0), solver_table(name, 4, 5.0, 1000, LIGHTNING)
    np.testing.assert_allclose(tables[0].timesteps, timesteps, atol=0.05)
    assert all(table.noise.any() == (name == "lcm") for table in tables)


@pytest.mark.parametrize("name", sorted(SOLVERS))
@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_table_layout(name: str, num_steps: int) -> None:
    table = solver_table(name, num_steps, 8.0)
    check_layout(table, name, num_steps)
    assert np.abs(table.coefficients).max() <= 1  # no cancellation of large terms in float32


def check_layout(table: SolverTable, name: str, num_steps: int) -> None:
    assert table.name == name
    assert table.coefficients.shape == (num_steps, len(COLUMNS)) == (num_steps, 9)
    assert table.coefficients.dtype == table.timesteps.dtype == table.noise.dtype == np.float32
    assert table.coefficients.flags.c_contiguous
    assert table.timesteps.shape == table.noise.shape == (num_steps,)
    assert table.sigmas.shape == (num_steps + 1,)
    assert np.isfinite(table.coefficients).all()
    # The last step goes to sigma 0 and returns the prediction itself.
    np.testing.assert_array_equal(table.coefficients[-1, 6:], [0, 1, 0])
    assert table.sigmas[-1] == table.noise[-1] == 0


@pytest.mark.parametrize("name", sorted(SOLVERS.keys() - {"dmd"}))
def test_explicit_timesteps(name: str) -> None:
    """The model is given exactly these; steps and shift are not used."""
    table = solver_table(name, 30, 12.0, 1000, LIGHTNING)
    check_layout(table, name, 4)
    np.testing.assert_array_equal(table.timesteps, np.array(LIGHTNING, np.float32))
    first = np.float32(1 - 1e-6) if name == "unipc" else 1  # where lambda would be infinite
    third = np.float32(833.33) / np.float32(1000)
    np.testing.assert_array_equal(table.sigmas, np.array([first, 0.9375, third, 0.625, 0], np.float32))
    np.testing.assert_array_equal(table.coefficients[:, 0], table.sigmas[:-1].astype(np.float32))
    half = solver_table(name, 30, 12.0, 500, [500, 250])
    np.testing.assert_array_equal(half.sigmas[1:], [0.5, 0])


@given(
    name=st.sampled_from(sorted(SOLVERS)),
    timesteps=st.sets(st.integers(1, 1000), min_size=1, max_size=60),
)
def test_any_falling_timesteps_make_a_table(name: str, timesteps: set[int]) -> None:
    table = solver_table(name, 1, 1.0, 1000, sorted(timesteps, reverse=True))
    check_layout(table, name, len(timesteps))
    assert (np.diff(table.sigmas) < 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heun", 4, 5.0), f"unknown solver; expected {', '.join(SOLVERS)}; found 'heun'"),
        (("unipc", 0, 5.0), "at least 1; found 0"),
        (("unipc", -3, 5.0), "at least 1; found -3"),
        (("euler", 4, 0.0), "positive number"),
        (("dpm++", 4, -1.0), "positive number"),
        (("unipc", 4, math.nan), "positive number"),
        (("lcm", 4, math.inf), "positive number"),
        (("unipc", 4, 5.0, 1), "training timesteps"),
        (("unipc", 50, 1e6), "not distinct in float32; use fewer steps"),
        (("dpm++", 4, 1e-45), "not distinct in float32"),
        (("heun", 4, 5.0, 1000, LIGHTNING), "unknown solver"),
        (("euler", 4, 5.0, 1, [1]), "training timesteps"),
        *(
            (("lcm", 4, 5.0, 1000, timesteps), FALLING + found)
            for timesteps, found in (
                ([], "none"),
                ([1000.5, 3], "1000.5, 3"),
                ([500, 0], "500, 0"),
                ([-1], "-1"),
                ([500, 500], "500, 500"),
                ([500, 501], "500, 501"),
                ([1000, 999.99999], "1000, 999.99999"),  # equal in float32
                ([math.nan], "nan"),
                ([1e300], "1e+300"),
                (range(20, 0), "none"),
                ([*range(20, 10, -1), 10, 10], "20, 19, 18, 17, 16, 15, 14, 13, ..."),
            )
        ),
        (("euler", 4, 5.0, 1000, [500, 1e-45]), "not distinct in float32; found 500, 1e-45; leave"),
        (("unipc", 4, 5.0, 1000, [1000, 999.9999]), "too near to one another: their sigmas are not"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        solver_table(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_steps_that_a_video_leaves(name: str) -> None:
    """They are those of a table that begins there, without history; of a grid the last int(N strength)."""
    whole = solver_table(name, 10, 3.0)
    for strength, left in ((1.0, 10), (0.99, 9), (0.3, 3), (0.19, 1)):
        table = solver_table(name, 10, 3.0, strength=strength)
        assert len(table.timesteps) == left and table.skipped == 10 - left
        assert np.array_equal(table.timesteps, whole.timesteps[-left:])
        assert np.array_equal(table.sigmas, whole.sigmas[-left - 1 :])
        history = [COLUMNS.index(column) for column in ("c_last", "c_1", "c_2", "p_1")]
        assert not table.coefficients[0, history].any()


def test_explicit_steps_begin_at_the_level_of_the_strength() -> None:
    """Of shift 5 a grid is at 0.882 at strength 0.6, and at 0.556 at 0.2."""
    fitted = [[0.5, 0.3, 0.1, 0.05]] * 4
    given = {"timesteps": (1000, 900, 880, 500), "coefficients": fitted}
    for strength, left in ((1.0, 4), (0.65, 3), (0.6, 2), (0.2, 1)):
        table = solver_table("euler", 4, 5.0, 1000, **given, strength=strength)  # type: ignore[arg-type]
        assert len(table.timesteps) == left
        taken = table.coefficients[:, [COLUMNS.index(name) for name in ("c_x", "p_0", "p_1", "c_2")]]
        rows = [(0.5, 0.45, 0, 0), (0.5, 0.3, 0.15, 0), (0.5, 0.3, 0.1, 0.05)]
        if left < 4:
            np.testing.assert_allclose(taken, rows[:left], rtol=1e-6)
    assert (table.coefficients[:, 0] == 0.5).all()


@pytest.mark.parametrize(
    ("timesteps", "expected", "found"), [(None, "1 / 9", None), ((1000, 500), "0.3571", "0.5")]
)
def test_a_strength_that_leaves_no_step(timesteps: Any, expected: str, found: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        solver_table("euler", 9, 5.0, 1000, timesteps, strength=0.1)
    assert expected in str(caught.value.expected) and (found is None or found in str(caught.value.found))
