"""Programs that make steps are proven by drawn ones: refused if an argument decides less than it should."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import numpy as np
import pytest

import wanrun
from helpers.artifacts import far_toy
from helpers.damage import linked
from helpers.manifests import plain_manifest
from helpers.refusals import refuses
from helpers.small_loop import MAX_STEPS, SHAPE, small_programs
from helpers.wrong_programs import DOCTORED, take_otherwise
from wanbuild.check import verify
from wanbuild.programs import denoiser
from wanbuild.programs.denoiser import solver_step
from wanbuild.programs.export import builder_of, export_program
from wanbuild.targets.target import resolve_target
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.roles import FORMS, ROLES, forms_of, roles_of
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import initial_noise
from wanrun.errors import VerificationError
from wanrun.executables.executables import LoadedProgram
from wanrun.executables.lowering import lower
from wanrun.generation.sampler import Sampler
from wanrun.replay.golden import Replay, recorded_generation, replayed
from wanrun.replay.guided import HALF
from wanrun.replay.proof import Bounded, check_all_ran, prove_encoders, prove_steps, updated
from wanrun.replay.random_steps import DrawnSteps, LoopStart, drawn, velocities
from wanrun.weights.bound_programs import Programs

# --- proof ---


WRONG = r"makes other steps than the solver's table says: wrong \w+"


def prove(form: str, max_steps: int = MAX_STEPS, **options: Any) -> None:
    """Proves the small programs of a form, with both experts; options as of ``small_programs``."""
    facts = {"width": 40, "height": 32, "num_frames": 9, "num_videos": 1, "num_references": 0}
    built = types.SimpleNamespace(max_steps=max_steps, dtype="float32", guiders=())
    profile: Any = types.SimpleNamespace(**facts, guidance=False, num_prompts=1, options=built)
    programs: Any = small_programs(max_steps=max_steps, **options)
    sampler = Sampler(programs, plain_manifest(), profile, cast(Any, None))
    start = LoopStart(("transformer", "transformer_2"), np.empty(0), Conditions(), initial_noise(0, SHAPE))
    prove_steps(sampler, start, form)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "rows"), [("step", 16), ("scan", 16), ("scan", 2), ("scan", 1)])
def test_right_programs_pass(form: str, rows: int, dtype: str) -> None:
    """Also if the loop's table has few rows."""
    prove(form, rows, dtype=dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["step", "scan"])
@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_update(name: str, form: str) -> None:
    """In bfloat16, whose roundings are allowed most."""
    with pytest.raises(VerificationError, match=WRONG):
        prove(form, dtype="bfloat16", update=DOCTORED[name])


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["first", "last"])
def test_a_loop_that_forgets_which_steps_it_makes(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = jax.lax.fori_loop

    def loop(first: Any, last: Any, body: Any, state: Any) -> Any:
        first, last = (first - first, last - first) if forgotten == "first" else (first, first + 1)
        return own(first, last, body, state)

    monkeypatch.setattr(jax.lax, "fori_loop", loop)
    with pytest.raises(VerificationError, match=WRONG):
        prove("scan", update=functools.partial(solver_step))  # an update of its own is not compiled yet


def test_a_state_that_nothing_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanrun.replay.random_steps.HISTORY", ("last", "m1", "m2", "m3"))
    with refuses("other_results", VerificationError, what="denoise_step", found="history"):
        prove("step")


def test_bounds_hold_what_float32_may_round() -> None:
    """Of the recurrence in float32, from a state in bfloat16, against float64: also in the worst case."""
    rng, rounding = np.random.default_rng(3), 2.0**-8
    rows = rng.uniform(-1, 1, (2, 9)).astype(np.float32)
    state = {name: rng.standard_normal(200) for name in ("latents", "last", "m1", "m2")}
    made = [rng.standard_normal(200) for _ in rows]
    exact = updated(rows, state, made, rounding)
    errors = [one * (1 + rounding * rng.choice([-1, 1], 200)) for one in made]
    off = updated(rows, state, errors, rounding)
    for name in ("latents", "last"):
        assert np.all(np.abs(off[name].values - exact[name].values) <= exact[name].bound)
    assert np.array_equal(exact["m2"].values, made[0]) and np.array_equal(exact["m1"].values, made[1])
    assert Bounded.stored(np.full(1, -2.0), 0.5).rounded(0.25).bound == 1.5


@pytest.fixture(scope="module")
def opened(media_toy: Callable[[str], tuple[Path, Path]]) -> Iterator[tuple[wanrun.Pipeline, Replay]]:
    """A pipeline of a profile with all forms of the loop, guiders and two experts; and its replay."""
    with wanrun.load(media_toy("wan2.2-i2v")[1], embeddings="none") as pipeline:
        yield pipeline, replayed(pipeline, pipeline.environment)


@pytest.fixture
def doctored_leave(
    opened: tuple[wanrun.Pipeline, Replay], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Any], None]:
    """Puts a program at the end of streamed steps that is compiled with something else in the denoiser."""

    def put(what: str, other: Any) -> None:
        pipeline, _ = opened
        builder = builder_of(pipeline.manifest, pipeline.profile, resolve_target("cpu", {}))
        spec = builder.named("stream_leave")
        with mock.patch.object(denoiser, what, other):
            data = export_program(spec, "cpu")
        lowered = lower(data, spec.name, spec.donate, jax.devices("cpu")[0])
        own, program = Programs.bound, LoadedProgram(lowered.compile(), spec.inputs)

        def bound(self: Programs, name: str, *loras: Any, **components: str) -> Any:
            right = own(self, name, *loras, **components)
            return program if name == spec.name else right

        monkeypatch.setattr(Programs, "bound", bound)

    return put


@pytest.mark.thorough
@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_end_of_streamed_steps(
    name: str, opened: tuple[wanrun.Pipeline, Replay], doctored_leave: Callable[[str, Any], None]
) -> None:
    pipeline, replay = opened
    doctored_leave("solver_step", DOCTORED[name])
    session = pipeline.session(pipeline.profile)
    replay.prove(session, ("step",))
    with pytest.raises(VerificationError, match=f"stream_leave {WRONG}"):
        replay.prove(session, ("stream",))


@pytest.mark.thorough
def test_a_wrong_program_is_not_recorded(
    media_toy: Callable[[str], tuple[Path, Path]], tmp_path: Path, doctored_leave: Callable[[str, Any], None]
) -> None:
    """The video of the form of single steps is right."""
    artifact = linked(media_toy("wan2.2-i2v")[1], tmp_path / "artifact")
    doctored_leave("solver_step", DOCTORED["predictor without m1"])
    with pytest.raises(VerificationError, match=f"stream_leave {WRONG}"):
        verify.record(artifact, lambda line: None)
    assert read_manifest(artifact).golden == {}


@pytest.mark.thorough
def test_a_record_runs_every_role(
    media_toy: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it did not run would be refused: forms of the loop besides the video's own, until proven."""
    artifact, own, checked = media_toy("wan2.2-i2v")[1], Replay.prove, set[str]()

    def prove(self: Replay, sampler: Sampler, forms: Sequence[str]) -> None:
        whole = [form for form in forms if not FORMS[form].streams]
        own(self, sampler, whole)
        programs = sampler.programs
        idle = programs.weights.executables.idle(sampler.profile)
        assert {programs[name].role for name in idle} == set(FORMS["stream"].roles)
        with refuses("other_results", VerificationError, what="stream_", remedy="build"):
            check_all_ran(pipelines[0])
        check_all_ran(pipelines[0], whole)
        own(self, sampler, forms)

    def check(pipeline: wanrun.Pipeline) -> None:
        check_all_ran(pipeline)
        programs = pipeline.session(pipeline.profile).programs
        checked.update(programs[name].role for name in programs)

    pipelines: list[wanrun.Pipeline] = []
    monkeypatch.setattr(verify, "prove_encoders", lambda one, texts: _note(pipelines, one, texts))
    monkeypatch.setattr(verify, "check_all_ran", check)
    monkeypatch.setattr(Replay, "prove", prove)
    here = open_artifact(artifact)
    (profile,) = here.manifest.profiles.values()
    verify._run(here, profile, None)
    roles = {role.name for form in forms_of("all") for role in roles_of(form)} - {"once", "start", "past"}
    # It has no image encoder, no tiny decoder, no custom kernel, no chunks, and nothing to begin with.
    others = {"spread", "once", "start", "past", "decode_tiny", "attention", "begin", "chunk", "remember"}
    assert checked == roles == ROLES.keys() - others


def _note(pipelines: list[wanrun.Pipeline], pipeline: wanrun.Pipeline, texts: Any) -> None:
    pipelines.append(pipeline)
    prove_encoders(pipeline, texts)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sampler, LoopStart]]:
    """The session of a model that makes a video chunk by chunk, and what its steps are made from."""
    with wanrun.load(far_toy(tmp_path_factory)[1], embeddings="none") as pipeline:
        generation = recorded_generation(pipeline)
        start = LoopStart.of(pipeline, generation, generation.read_media())
        yield pipeline.session(pipeline.profile), start


@pytest.mark.slow
def test_the_steps_of_every_length_of_chunks_are_proven(chunked: tuple[Sampler, LoopStart]) -> None:
    sampler, start = chunked
    prove_steps(sampler, start, "chunks")
    idle = sampler.programs.weights.executables.idle(sampler.profile)
    ran = {name for name in sampler.programs if name not in idle}
    assert {"chunk", "chunk_first", "chunk_last", "remember"} <= ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "key", "change", "message"),
    [
        ("chunk_last", "coefficients", lambda row: row[::-1], f"chunk_last {WRONG}"),
        ("chunk_first", "cache", np.zeros_like, "cache changes nothing of what chunk_first returns"),
        ("remember", "cache", np.zeros_like, "cache changes nothing of what remember returns"),
        ("remember", "latents", np.zeros_like, "latents changes nothing of what remember returns"),
    ],
)
def test_what_a_program_of_chunks_leaves_out(
    chunked: tuple[Sampler, LoopStart],
    program: str,
    key: str,
    change: Callable[[Any], Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_otherwise(monkeypatch, key, functools.partial(jax.tree.map, change), program)
    with pytest.raises(VerificationError, match=message):
        prove_steps(*chunked, "chunks")


# --- drawn ---


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    facts = {"width": 40, "height": 32, "num_frames": 9, "num_videos": 1, "num_references": 0}
    built = types.SimpleNamespace(max_steps=MAX_STEPS, dtype="float32", guiders=())
    profile: Any = types.SimpleNamespace(**facts, guidance=False, num_prompts=1, options=built)
    programs: Any = small_programs(max_steps=MAX_STEPS)
    return Sampler(programs, plain_manifest(), profile, cast(Any, None))


START = LoopStart(("transformer", "transformer_2"), np.empty(0), Conditions(), initial_noise(0, SHAPE))


def test_a_velocity_is_the_same_in_each_form(sampler: Sampler) -> None:
    """Of a step alone, and of the first of two in one call; each expert has its own."""
    step, scan = (velocities(sampler, START, form, form, 1.0) for form in ("step", "scan"))  # type: ignore[arg-type]
    assert step.shape == (2, *SHAPE) and np.allclose(step, scan, atol=1e-5)
    assert not np.allclose(step[0], step[1])


def test_no_coefficient_is_small(sampler: Sampler) -> None:
    steps = [DrawnSteps.drawn(sampler, START, "scan", "scan", "transformer") for _ in range(2)]
    assert all(np.array_equal(one.rows, steps[0].rows) for one in steps)
    assert len(steps[0].rows) == 2 and np.abs(steps[0].rows).min() >= 0.25


def test_scalars_turn_parts_of_a_program_on() -> None:
    avals = {"image": "uint8[2,3]", "later": "int32[]", "kv": {"k": "bfloat16[4]"}, "bits": "uint16[4]"}
    off, on = (drawn(avals, number) for number in (0, 1))
    assert (off["later"], on["later"]) == (0, 1) and off["image"].max() > 1
    assert on["kv"]["k"].dtype == "bfloat16" and on["kv"]["k"].all()
    assert np.array_equal(on["bits"], drawn("bfloat16[4]", 1).view(np.uint16))


# --- guided ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "key", "change", "message"),
    [
        ("step", "guidance_projection", np.zeros_like, "denoise_step does not combine passes as cfg-zero"),
        ("step", "guidance_projection", np.ones_like, "guidance_projection changes nothing"),
        ("step", "skip_scale", np.square, "denoise_step does not combine passes as skip-layer"),
        ("step", "skip_layers", np.ones_like, "denoise_step does not combine passes as skip-layer"),
        ("step", "skip_layers", np.zeros_like, "skip_layers changes nothing"),
        (
            "stream",
            "guidance_scale",
            lambda scale: np.float32(HALF),
            "guidance_scale changes nothing of what",
        ),
        ("stream", "guidance_scale", lambda scale: scale * scale / np.float32(HALF), f"stream_leave {WRONG}"),
        ("stream", "guidance_projection", np.zeros_like, "leave does not combine passes as cfg-zero"),
        ("stream", "skip_scale", np.square, "leave does not combine passes as skip-layer"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_an_input_that_decides_something_else(
    form: str,
    key: str,
    change: Callable[[Any], Any],
    message: str,
    opened: tuple[wanrun.Pipeline, Replay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that make something else of an input than they should."""
    pipeline, replay = opened
    take_otherwise(monkeypatch, key, change)
    with pytest.raises(VerificationError, match=message):
        replay.prove(pipeline.session(pipeline.profile), (form,))
