"""A program that was compiled here is taken where it is faster than the artifact's and agrees with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from helpers.manifests import plain_program
from wanrun.executables import tuning
from wanrun.executables.entries import overlay_path
from wanrun.executables.store import Executables, LoadedProgram
from wanrun.executables.tuning import (
    CALLS,
    Contest,
    Outcome,
    difference,
    drawn_like,
    is_tuned,
    tuned_options,
)
from wanrun.generation.load import load

Program = Callable[..., Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Lets the artifact's executable take so many seconds, and the other one so many."""

    def set_times(built: float, here: float) -> None:
        timed = 2 * (1 + CALLS)
        steps = itertools.chain([built] * timed, itertools.repeat(here))
        passed = itertools.accumulate(steps)
        monkeypatch.setattr(tuning, "now", lambda: next(passed))

    return set_times


class Noted:
    """A function whose calls are counted."""

    def __init__(self, function: Program) -> None:
        self.function, self.calls = function, 0

    def __call__(self, **arguments: Any) -> Any:
        self.calls += 1
        return self.function(**arguments)


def doubled(weights: Any, x: Any) -> Any:
    return {"y": 2 * x + weights}


@pytest.mark.parametrize(("built_seconds", "here_seconds", "better"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_is_taken(
    clock: Callable[[float, float], None], built_seconds: float, here_seconds: float, better: bool
) -> None:
    clock(built_seconds, here_seconds)
    built, here, outcomes = Noted(doubled), Noted(doubled), list[Outcome]()
    contest = Contest(built, here, ["weights"], 1e-4, outcomes.append)
    x = jnp.ones((2, 3))
    for _ in range(2):
        assert np.array_equal(contest(weights=1.0, x=x)["y"], np.full((2, 3), 3.0))
    (outcome,) = outcomes  # decided once, with inputs of its own
    assert (outcome.seconds, outcome.built_seconds, outcome.better) == (here_seconds, built_seconds, better)
    assert (built.calls, here.calls) == (1 + CALLS + 2 * (not better), 1 + CALLS + 2 * better)


def test_one_that_computes_something_else_is_not_taken(clock: Callable[[float, float], None]) -> None:
    clock(2.0, 1.0)
    outcomes: list[Outcome] = []
    other = Noted(lambda weights, x: {"y": 2.01 * x + weights})
    contest = Contest(doubled, other, ["weights"], 1e-4, outcomes.append)
    assert float(contest(weights=1.0, x=jnp.ones((2, 3)))["y"][0, 0]) == 3.0
    assert not outcomes[0].better and outcomes[0].difference.endswith("relative, at most 0.0001")


def test_donated_inputs_are_given_anew(clock: Callable[[float, float], None]) -> None:
    clock(2.0, 1.0)
    step = jax.jit(lambda x: {"x": x + 1}, donate_argnames="x")
    x = jnp.zeros((4, 4))
    contest = Contest(lambda x: step(x=x), lambda x: step(x=x), [], 1e-4, lambda outcome: None)
    assert float(contest(x=x)["x"][0, 0]) == 1.0


def test_differences() -> None:
    zeros, ones = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    assert difference(zeros, zeros, 1e-4) == "" and difference(ones, ones * (1 + 1e-5), 1e-4) == ""
    assert difference(zeros, ones * 1e-9, 1e-4) == "by nan relative, at most 0.0001"
    assert difference(ones, ones * np.nan, 1e-4) != ""
    assert difference(ones.astype(np.uint8), zeros.astype(np.uint8), 1e-4) == ""
    assert difference(9 * ones.astype(np.uint8), zeros.astype(np.uint8), 1e-4) == "by 9 levels, at most 1.03"


def test_what_is_drawn_has_the_shape_of_what_is_given() -> None:
    drawn = drawn_like(jnp.zeros((300, 400), jnp.bfloat16))
    assert (drawn.shape, drawn.dtype) == ((300, 400), jnp.bfloat16)
    assert abs(float(drawn.astype(np.float32).std()) - 1) < 0.02
    assert drawn_like(np.zeros((9, 9, 3), np.uint8)).max() > 200
    for same in (np.float32(3), np.arange(5), np.arange(6).reshape(2, 3)):  # steps, coefficients, tokens
        assert np.array_equal(drawn_like(same), same)


def test_autotuning_is_not_turned_off_on_the_chip() -> None:
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False", "xla_tpu_x": "true"}
    assert tuned_options(options) == {"xla_tpu_x": "true"}


def test_embeddings_keep_their_bits() -> None:
    assert not is_tuned(plain_program(role="text"))
    assert not is_tuned(plain_program(role="spread"))
    assert is_tuned(plain_program(role="prepare"))


def test_a_later_run_takes_what_was_kept(
    toy_artifact: Path, clock: Callable[[float, float], None], tmp_path: Path
) -> None:
    lines: list[str] = []
    with load(toy_artifact, lazy=True, report=lines.append) as pipeline:
        opened, profile = pipeline._opened, pipeline.profile
        weights = pipeline.component_weights("transformer")

        def prepare(retune: bool) -> tuple[Executables, Any]:
            policy = msgspec.structs.replace(opened.policy, retune=retune)
            executables = Executables(replace(opened, policy=policy))
            (loading,) = executables.request(profile, ["prepare"])
            program: LoadedProgram = loading.result()
            arrays = opened.programs(profile)["prepare"].avals["inputs"]
            given = {name: np.zeros(*reversed(shaped(text))) for name, text in arrays.items()}
            return executables, program(transformer=weights, **given)

        clock(1.0, 2.0)
        _, first = prepare(retune=True)
        assert lines.pop() == "retuned prepare: 2 s a call here, 1 s as it was built; the artifact's is used"
        clock(2.0, 1.0)
        prepare(retune=True)
        folder = overlay_path(opened.manifest, "cpu")
        said = f"retuned prepare: 1 s a call here, 2 s as it was built; kept in {folder}"
        assert lines.pop() == said and len(list(folder.iterdir())) == 1
        executables, second = prepare(retune=False)
        program = opened.programs(profile)["prepare"]
        files = executables._read(profile, "prepare", program)
        assert executables._tuned(files) is not None
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
        (kept,) = folder.glob("*.executable")
        kept.write_bytes(b"damaged")
        assert executables._tuned(files) is None
        prepare(retune=False)  # with the artifact's
        assert lines == [] and opened.policy.tuned


def shaped(text: str) -> tuple[Any, tuple[int, ...]]:
    from wanrun.artifact.programs import aval

    return aval(text)
