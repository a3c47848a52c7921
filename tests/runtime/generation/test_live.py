"""Live video: chunks as they are made, what is kept of each, and a prompt that changes."""

from __future__ import annotations

import gc
import itertools
import threading
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

import wanrun
from helpers.artifacts import build_artifact, far_toy, shared
from helpers.pictures import pictures
from helpers.refusals import refuses
from wanrun.artifact.model import Chunking
from wanrun.artifact.roles import FORMS, ROLES
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.past import Given, Latents
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.errors import ArtifactError, CancelledError, UsageError, WanError
from wanrun.executables.tolerance import relative_error
from wanrun.generation.chunks import BEGIN, REMEMBER, ChunkLoop
from wanrun.generation.live import Chunk, Live, LiveAccess
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Inputs, Media
from wanrun.opened.cancel import CancelToken
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings

PROMPT, OTHER = "a fox in the snow", "a red house"
HOW = {"num_steps": 1, "seed": 3}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with wanrun.load(far_toy(tmp_path_factory)[1], embeddings="none") as loaded:
        yield loaded


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "frames", "lengths"), [(0, 57, [1, 3, 3, 3, 3, 2]), (25, 45, [1, 3, 3, 3, 2])]
)
def test_chunks_are_those_of_the_whole_video(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, given: int, frames: int, lengths: list[int]
) -> None:
    """Of one longer than the profile, and with frames that are given, which are the first ones.

    They are read while others have the device.
    """
    media, steps = Media(video=pictures(given, 96, 64)) if given else None, list[tuple[int, int]]()
    whole = pipeline.generate(
        PROMPT, media=media, num_frames=frames, on_step=lambda *step: steps.append(step), **HOW
    )
    read, held = Generation.read_media, list[int]()
    looked = lambda *args, **more: (held.extend(pipeline._turns._queue), read(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(Generation, "read_media", looked)
    chunks = list(pipeline.live(PROMPT, max_frames=frames, media=media, **HOW))
    assert ("read_media" in chunks[0].timings.spans) is bool(given) and not held
    assert [chunk.latents.shape[2] for chunk in chunks] == lengths
    assert [chunk.first for chunk in chunks] == [0, 1, 13, 25, 37, 49][: len(lengths)]
    assert np.array_equal(latents_of(chunks), whole.latents)
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks], 1), whole.frames)
    assert (whole.options["num_frames"], whole.options.get("profile_frames", 45)) == (frames, 45)
    made = len(lengths) - (3 if given else 0)  # one step each
    assert steps == [(number + 1, made) for number in range(made)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_frames": 60}, "num_frames"),
        ({"num_frames": 4505}, "num_frames"),
        ({"num_frames": 61, "window_frames": 45}, "window_frames"),
        ({"num_frames": 21, "media": Media(video=())}, "num_frames"),
        ({"num_frames": 61, "clips": 2}, None),
    ],
)
def test_what_is_no_length(pipeline: Pipeline, options: dict[str, Any], named: str | None) -> None:
    with pytest.raises(WanError) as raised:
        pipeline.resolve(PROMPT, **options)
    assert named is None or raised.value.fields[0] == named


def test_chunks_that_are_given_make_no_steps(pipeline: Pipeline) -> None:
    counts = [
        pipeline.resolve(PROMPT, media=media, **HOW).counts(inputs)
        for media, inputs in (
            (None, None),
            (Media(image=pictures(1, 96, 64)[0]), None),
            (Media(video=()), None),  # not read
            (Media(video=()), Inputs({"given_frames": np.array(25)})),
        )
    ]
    assert [(one.given, one.told_steps) for one in counts] == [(0, 5), (1, 4), (0, 5), (3, 2)]
    assert {ROLES["remember"].calls(one) for one in counts} == {4}


@pytest.mark.thorough
def test_a_rounded_model(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In bfloat16, of which a CPU keeps the bits, with weights of 8 bits."""

    def build(folder: Path) -> None:
        checkpoint, _ = far_toy(tmp_path_factory)
        build_artifact(
            checkpoint, folder, guidance=(False,), num_frames=13, quantise="int8", dtype="bfloat16"
        )

    with wanrun.load(shared(tmp_path_factory, "far-rounded", build), embeddings="none") as rounded:
        kept = rounded.session(rounded.profile).programs["remember"].avals["outputs"]["cache"]
        assert {text.partition("[")[0] for text in kept.values()} == {"uint16", "float32"}
        whole = rounded.generate(PROMPT, **HOW).latents
        live = latents_of(rounded.live(PROMPT, max_frames=13, **HOW))
    assert np.array_equal(live, whole)
    noise = np.concatenate([initial_noise(3, whole.shape)] * 3, 2)
    right = pipeline.generate(PROMPT, latents=noise, **HOW).latents[:, :, :4]
    for chunk in (slice(0, 1), slice(1, None)):  # seen 4e-3
        assert 1e-4 < relative_error(whole[:, :, chunk], right[:, :, chunk]) < 1e-2


def latents_of(chunks: Iterable[Chunk]) -> np.ndarray:
    return np.concatenate([chunk.latents for chunk in chunks], 2)


@pytest.mark.thorough
def test_a_prompt_changes_from_the_next_chunk_on(pipeline: Pipeline) -> None:
    same, changed = (pipeline.live(PROMPT, max_frames=37, **HOW) for _ in range(2))
    pairs = []
    for number, (one, other) in enumerate(zip(same, changed, strict=True)):
        pairs.append((np.array_equal(one.latents, other.latents), other.prompt))
        if number == 1:
            changed.send(prompt=OTHER)
    assert pairs == [(True, PROMPT), (True, PROMPT), (False, OTHER), (False, OTHER)]
    with refuses("wrong_type", what="prompt", expected="a string", found=3):
        changed.send(prompt=3)  # type: ignore[arg-type]


def test_with_guidance_the_negative_prompt_goes_with_each_prompt(pipeline: Pipeline) -> None:
    plain, told = pipeline.resolve(PROMPT, **HOW), []
    ranges = (ExpertRange.alike("transformer", 0, 1, 2.0),)
    guided = replace(plain, options={**plain.options, "negative_prompt": "blurry"}, ranges=ranges)

    def encode(session: Any, prompts: Sequence[str], timings: Any) -> np.ndarray:
        told.append(prompts)
        raise CancelledError("cancelled", "encoded")

    device = LiveAccess(lambda *_: nullcontext(), lambda *_: nullcontext(), encode)
    with pytest.raises(CancelledError):
        next(Live(guided, pipeline.session(guided.profile), device))
    assert told == [[PROMPT, "blurry"]]


@pytest.mark.thorough
def test_a_video_goes_on_in_the_same_memory(pipeline: Pipeline) -> None:
    held = []
    tracemalloc.start()
    with pipeline.live(PROMPT, **HOW) as live:
        for chunk in itertools.islice(live, 9):  # from the sixth on, the oldest frames are let go
            assert np.isfinite(chunk.latents).all()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert chunk.first == 1 + 12 * 7
    assert held[-1] < held[6] + 2**18  # a chunk's latents and frames are 2 MB
    assert list(live) == []


@pytest.mark.thorough
def test_given_latents_are_the_noise_of_the_first_chunks(pipeline: Pipeline) -> None:
    _, channels, _, *cells = pipeline.latents_shape
    noise = Noise(9)((1, channels, 4, *cells))
    whole = pipeline.generate(PROMPT, latents=noise, num_frames=13, **HOW)
    assert np.array_equal(pipeline.decode(whole.latents), whole.frames)
    live = pipeline.live(PROMPT, latents=noise, **HOW)
    first, second, third = itertools.islice(live, 3)
    assert np.array_equal(np.concatenate([first.latents, second.latents], 2), whole.latents)
    assert third.latents.shape[2] == 3
    with pytest.raises(UsageError, match="chunk"):
        pipeline.live(PROMPT, latents=noise[:, :, :3], **HOW)


@pytest.mark.slow
def test_frames_are_cut_to_what_was_asked_for(pipeline: Pipeline) -> None:
    chunks = list(pipeline.live(PROMPT, max_frames=9, **HOW))
    assert [chunk.frames.shape[1] for chunk in chunks] == [1, 8]
    for frames in (10, "9", 9.0, True):
        with pytest.raises(UsageError, match="max_frames"):
            pipeline.live(PROMPT, max_frames=frames, **HOW)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_frames"):
        pipeline.live(PROMPT, num_frames=61, **HOW)


@pytest.mark.thorough
def test_it_ends_in_the_middle_of_a_chunk(pipeline: Pipeline) -> None:
    token = CancelToken()
    cancelled, closed = pipeline.live(PROMPT, cancel=token, **HOW), pipeline.live(PROMPT, **HOW)
    next(cancelled)
    token.cancel()
    with pytest.raises(CancelledError):
        next(cancelled)
    threading.Timer(0.2, closed.close).start()
    assert len(list(closed)) < 500
    pipeline.generate(PROMPT, **HOW)  # the device is free


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.thorough
def test_an_ended_video_holds_nothing_of_the_device(pipeline: Pipeline) -> None:
    list(pipeline.live(PROMPT, max_frames=13, **HOW))  # loads what stays
    gc.collect()
    gc.disable()
    try:
        before = device_bytes()
        dropped, closed = pipeline.live(PROMPT, **HOW), pipeline.live(PROMPT, **HOW)
        next(dropped), next(closed)
        assert device_bytes() > before + 2**20  # what chunks see of those before
        del dropped
        closed.close()
        # At most the last latents, of 6 kB: JAX lets go of what it was given with its next transfer.
        assert device_bytes() < before + 2**14
    finally:
        gc.enable()
    assert list(closed) == []


def test_a_model_that_makes_a_video_at_once_is_not_live(toy_artifact: Path) -> None:
    with wanrun.load(toy_artifact, lazy=True) as pipeline, pytest.raises(UsageError):
        pipeline.live(PROMPT)


# What is kept of a chunk, when, and by which prompt.


SHAPE = (1, 2, 3, 4, 6)


class Recorder:
    """Makes chunks that are their number, and writes down what it is called for."""

    chunks, key = Chunking(first=1, each=3), "k"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        avals = {"inputs": {"cache": {"k": "float32[2]"}, "latents": "float32[1,2,3,4,6]"}, "outputs": {}}
        keeper = SimpleNamespace(avals=avals, donated=("cache",), array=lambda _: ("float32", SHAPE))
        maker = SimpleNamespace(avals=avals, donated=("latents",), array=keeper.array)
        self.programs: Any = Programs({"beginner": None, "keeper": keeper, "maker": maker}, self.keep)

    def keep(self, *, text: str, cache: Any, chunk: np.int32, latents: np.ndarray) -> Mapping[str, Any]:
        self.calls.append((REMEMBER, text, int(chunk), latents.shape[2], float(latents[0, 0, 0, 0, 0])))
        return {"cache": {self.key: cache[self.key] + 1}}

    def prepare(self, run: Denoising, conditions: Conditions, steps: Any) -> dict[str, Any]:
        self.calls.append(("prepare", str(run.embeddings[0])))
        return {"text": str(run.embeddings[0])}

    def maker(self, role: str, shape: tuple[int, ...] = ()) -> str:
        return "maker"

    def expert_steps(self, run: Any, steps: Any, state: Any, constant: Any, draw: Any, later: Any) -> Any:
        number = int(constant["chunk"])
        kept = float(np.ravel(constant["cache"][self.key])[0])
        self.calls.append(("steps", constant["text"], number, kept))
        return {"latents": np.full_like(state["latents"], number + 10)}


class Programs(dict[str, Any]):
    def __init__(self, programs: Mapping[str, Any], keep: Any) -> None:
        super().__init__(programs)
        self._keep = keep

    def with_role(self, role: str) -> tuple[str, ...]:
        return tuple(name for name in self if name == {BEGIN: "beginner", REMEMBER: "keeper"}[role])

    def bound(self, name: str) -> Any:
        assert name == "beginner"
        return lambda: {"cache": {"k": np.zeros(2, np.float32)}}

    def of_expert(self, name: str, expert: str, loras: Any) -> Any:
        return self._keep


def run_of(prompt: str) -> Denoising:
    steps = ExpertRange("transformer", 0, 1, (1.0,))
    parts: Any = {
        "table": solver_table("flow-map", 1, 5.0),
        "ranges": (steps,),
        "embeddings": np.array([prompt]),
        "loop": "chunks",
    }
    return Denoising(**parts, timings=Timings())


def test_what_is_given_stands_for_a_first_chunk() -> None:
    """Its noise is drawn before that of the video's own first chunk, whose number is 1."""
    sampler, draw = Recorder(), Noise(0)
    one = Latents(np.ones((1, 2, 1, 4, 6), np.float32), np.zeros((1, 2, 1, 4, 6), np.float32))
    given = Given(one, [one], 0, True, 2)
    loop = ChunkLoop(cast(Any, sampler), Conditions(given=given), draw)
    expected, own = given.past(after := Noise(0)), draw(SHAPE)
    np.testing.assert_array_equal(own, after(SHAPE))
    sampler.key = "first"
    run = run_of("a")
    loop(run, own)
    loop(run, own)
    first = float(expected.first[0, 0, 0, 0, 0])
    assert [(call[0], call[2]) for call in sampler.calls[1:]] == [("steps", 1), (REMEMBER, 1), ("steps", 2)]
    assert sampler.calls[1][3] == first and sampler.calls[3][3] == first + 1


@pytest.mark.parametrize("held", [0, 1, 4])
def test_a_chunk_is_kept_before_the_next_one_by_its_own_prompt(held: int) -> None:
    assert FORMS["chunks"].chunked
    sampler = Recorder()
    given = np.full((2, held, 4, 6), 5, np.float32)
    loop = ChunkLoop(cast(Any, sampler), Conditions(held=given), Noise(0))
    one, other = run_of("a"), run_of("b")
    noise = np.zeros(SHAPE, np.float32)
    made = [loop(one, noise[:, :, :1]), loop(one, noise), loop(other, noise)]
    first, second = 5.0 if held else 10.0, 5.0 if held > 1 else 11.0
    assert [chunk.shape[2] for chunk in made] == [1, 3, 3]
    assert [float(chunk[0, 0, 0, 0, 0]) for chunk in made] == [first, second, 12.0]
    assert sampler.calls == [
        ("prepare", "a"),
        *([] if held else [("steps", "a", 0, 0.0)]),
        (REMEMBER, "a", 0, 3, first),
        *([] if held > 1 else [("steps", "a", 1, 1.0)]),
        (REMEMBER, "a", 1, 3, second),
        ("prepare", "b"),
        ("steps", "b", 2, 2.0),
    ]


def test_an_artifact_of_an_earlier_version() -> None:
    sampler = Recorder()
    del sampler.programs["beginner"]
    with pytest.raises(ArtifactError, match="role begin"):
        ChunkLoop(cast(Any, sampler), Conditions(), Noise(0))
