"""Another kind of step is a row of the table: it is built, checked, warmed up, run, tried and planned.

The kind repeats the velocity of the step before, which the full step returns for it, and takes no weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanrun
from helpers.artifacts import build_artifact, shared
from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, build_elsewhere, impostor, put_executable
from helpers.manifests import programs_of
from wanbuild.check.verify import record, replay
from wanbuild.plan.plan import PlanRequest, make_plan
from wanbuild.plan.report import table
from wanbuild.plan.subject import read_subject
from wanbuild.programs import kinds
from wanbuild.programs.denoiser import solver_step
from wanbuild.programs.kinds import ProgramKind, rows_of, state_of
from wanbuild.programs.parts import Parts
from wanbuild.programs.spec import ProgramSpec
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.steps import StepContext, in_turn
from wanrun.replay.trial import tried
from wanrun.timing.timings import Timings

PROMPT = "a fox in the snow"


def repeat(latents: Any, history: Any, velocity: Any, coefficients: Any, timestep: Any) -> dict[str, Any]:
    """A step with the velocity of the step before."""
    latents, history = solver_step(latents, velocity, history, coefficients)
    return {"latents": latents, "history": history, "velocity": velocity}


def repeat_step(parts: Parts) -> ProgramSpec:
    state = state_of(parts, "step")
    return parts.spec(repeat, {**state, **rows_of(parts, "step")}, tuple(state))


def repeat_scan(parts: Parts) -> ProgramSpec:
    def scan(coefficients: Any, timesteps: Any, first: Any, last: Any, **state: Any) -> dict[str, Any]:
        def body(index: jax.Array, state: Any) -> Any:
            return repeat(**state, coefficients=coefficients[index], timestep=timesteps[index])

        return jax.lax.fori_loop(first, last, body, state)  # type: ignore[no-any-return]

    state = state_of(parts, "scan")
    return parts.spec(scan, {**state, **rows_of(parts, "scan")}, tuple(state))


ROWS = (
    ProgramKind("repeat_step", "step", repeat_step, state=("velocity",)),
    ProgramKind("repeat_loop", "scan", repeat_scan, state=("velocity",)),
)


@contextmanager
def with_rows() -> Iterator[None]:
    """Adds the rows to the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "PROGRAMS", (*kinds.PROGRAMS, *ROWS))
        yield


@pytest.fixture(scope="session")
def built(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with both kinds of steps in both forms of the loop, and their recorded results."""

    def make(folder: Path) -> None:
        with with_rows():
            build_artifact(toy_checkpoint, folder)
        record(folder, print)

    return shared(tmp_path_factory, "kinds", make)


def test_the_full_step_returns_what_the_other_asks_for(built: Path) -> None:
    programs = programs_of(read_manifest(built), PROFILE)
    for form, name in (("step", "repeat_step"), ("scan", "repeat_loop")):
        full, other = (programs[one] for one in (f"denoise_{'loop' if form == 'scan' else form}", name))
        assert (full.role, full.place, other.role, other.place) == (form, 0, form, 1)
        assert full.donated == other.donated == ("latents", "history", "velocity")
        assert full.avals["outputs"].keys() == other.avals["outputs"].keys() == set(full.donated)
        assert "transformer" not in other.inputs


def test_without_it_the_full_step_is_as_before(built: Path, toy_artifact: Path) -> None:
    with_it, without = (programs_of(read_manifest(folder), PROFILE) for folder in (built, toy_artifact))
    changed = {name for name in without if with_it[name] != without[name]}
    assert changed == {"denoise_step", "denoise_loop"}


def test_it_is_verified(built: Path) -> None:
    assert replay(built, print) == {PROFILE: "digests equal"}


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_it_is_warmed_up_and_run(built: Path, loop: str) -> None:
    timings = Timings()
    with wanrun.load(built, embeddings="none", loop=loop, timings=timings) as pipeline:
        pipeline.warmup(timings)
        hits = timings.cache_hits
        assert hits == 8  # four of text, prepare, both kinds of steps, decode
        given: Mapping[str, Any] = {"num_steps": 4, "seed": 3}
        full = pipeline.generate(PROMPT, **given, timings=timings)
        turns = pipeline.generate(PROMPT, **given, rule=in_turn, timings=timings)
        assert (timings.cache_hits, timings.cache_misses) == (hits, 0)
        never = pipeline.generate(PROMPT, **given, rule=lambda step: step.programs[0])
    assert np.array_equal(never.latents, full.latents)
    assert not np.array_equal(turns.latents, full.latents) and np.isfinite(turns.latents).all()


def test_both_forms_are_the_same(built: Path) -> None:
    with wanrun.load(built, embeddings="none") as pipeline:
        step, scan = (
            pipeline.generate(PROMPT, num_steps=4, seed=3, loop=loop, rule=in_turn)
            for loop in ("step", "scan")
        )
    assert np.array_equal(step.latents, scan.latents)


def test_a_rule_may_look_at_the_state(built: Path) -> None:
    """It repeats a velocity as long as the latents have hardly moved."""
    norms: list[float] = []

    def rule(step: StepContext) -> str:
        assert step.state is not None
        norms.append(float(jnp.linalg.norm(step.state["latents"])))
        return step.programs[len(norms) % 2]

    with wanrun.load(built, embeddings="none", loop="step") as pipeline:
        pipeline.generate(PROMPT, num_steps=4, rule=rule)
    assert len(norms) == 3 and np.isfinite(norms).all()


@pytest.mark.parametrize("name", ["", "repeat_step", "repeat_loop"])
def test_it_is_tried(built: Path, tmp_path: Path, name: str) -> None:
    """As executables are that were built elsewhere; one that computes something else is refused."""
    artifact = tmp_path / "artifact"
    shutil.copytree(built, artifact)
    build_elsewhere(artifact)
    if name:
        put_executable(artifact, name, impostor(artifact, name))
    verdict = tried(artifact, TARGET, PROFILE, None, lambda verdict: None)
    assert verdict.passed == (not name), verdict.reason
    assert not name or verdict.reason.startswith("the latents")


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_it_is_planned(built: Path, loop: str) -> None:
    request = PlanRequest("v7x", options={"loop": loop, "dtype": "bfloat16"}, compiles=False, size=(128, 128))
    with with_rows():
        made = make_plan(read_subject(str(built)), replace(request, frames=9), lambda line: None)
    name = {"step": "repeat_step", "scan": "repeat_loop"}[loop]
    (planned,) = (call for call in made.generation.calls if call.name == name)
    assert (planned.component, planned.times) == (None, 0)
    assert made.chosen.figures[name].arguments > 0
    assert any(line.startswith(name) for line in table(made))
