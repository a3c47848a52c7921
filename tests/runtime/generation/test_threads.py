"""Several threads with one pipeline, or one each: the videos of single calls, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.damage import flip, linked, own
from helpers.opened import LIMIT_SECONDS, eventually
from helpers.pictures import picture
from helpers.refusals import refuses
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.media.inputs import Media
from wanrun.timing.timings import Timings

PROMPT = "a fox in the snow"
STEPS: Mapping[str, Any] = {"num_steps": 4, "flow_shift": 3.0, "boundary": 0.8}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def same(one: Result, other: Result) -> bool:
    return np.array_equal(one.latents, other.latents) and np.array_equal(one.frames, other.frames)


def check(artifact: Path, requests: list[dict[str, Any]], threads: ThreadPoolExecutor, **how: Any) -> None:
    """Makes every request alone, and then all of them at once, each in the same pipeline twice."""
    with wanrun.load(artifact, embeddings="none", **how) as pipeline:
        alone = [pipeline.generate(**request) for request in requests]
    assert len({result.latents.tobytes() for result in alone}) == len(requests)
    barrier = threading.Barrier(len(requests))

    def generate(request: dict[str, Any]) -> list[Result]:
        barrier.wait(LIMIT_SECONDS)
        return [pipeline.generate(**request) for _ in range(2)]

    with wanrun.load(artifact, embeddings="none", lazy=True, **how) as pipeline:
        for expected, found in zip(alone, threads.map(generate, requests), strict=True):
            assert all(same(expected, result) for result in found)
            assert [len(result.timings.step_seconds) for result in found] == [
                expected.options["num_steps"]
            ] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["auto", "low"])
def test_prompts_seeds_profiles_and_loops(
    two_experts_artifact: Path, threads: ThreadPoolExecutor, memory: str
) -> None:
    """Also where one expert and no text encoder beside it is held at a time."""
    requests = [
        {"prompt": PROMPT, "seed": 1, "guidance_scale": 4, "loop": "step"},
        {"prompt": "an owl", "seed": 2, "guidance_scale": 1, "loop": "scan"},
        {"prompt": "a long story " * 30, "seed": 3, "guidance_scale": 3, "loop": "scan"},
        {"prompt": PROMPT, "negative_prompt": "snow", "seed": 1, "guidance_scale": 4, "solver": "euler"},
    ]
    check(two_experts_artifact, [{**request, **STEPS} for request in requests], threads, memory=memory)


@pytest.mark.thorough
def test_images(media_toy: Callable[[str], tuple[Path, Path]], threads: ThreadPoolExecutor) -> None:
    images = [picture(90, 70, index) for index in range(3)]
    requests = [{"prompt": PROMPT, "media": Media(image=image), "num_steps": 2} for image in images]
    check(media_toy("wan2.1-i2v")[1], [*requests, {**requests[0], "prompt": "an owl"}], threads)


@pytest.mark.slow
def test_a_pipeline_each(toy_artifact: Path, threads: ThreadPoolExecutor) -> None:
    """They share nothing but what JAX has one of; in a line one has both."""
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        expected = [pipeline.generate(PROMPT, seed=seed, num_steps=2) for seed in range(2)]
        each = (pipeline.resolve(PROMPT, seed=seed, num_steps=2) for seed in range(2))
        assert all(map(same, expected, wanrun.run_all(pipeline, each)))

    def generate(seed: int) -> Result:
        with wanrun.load(toy_artifact, embeddings="none") as own_pipeline:
            return own_pipeline.generate(PROMPT, seed=seed, num_steps=2)

    assert all(map(same, expected, threads.map(generate, range(2))))


class Held:
    """A generation of five steps that stops after its first until it is told to go on."""

    def __init__(self, pipeline: Pipeline, threads: ThreadPoolExecutor) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self.result: Future[Result] = threads.submit(
            pipeline.generate, PROMPT, num_steps=5, seed=9, on_step=self._on_step
        )
        assert self._reached.wait(LIMIT_SECONDS)

    def _on_step(self, step: int, total: int) -> None:
        self._reached.set()
        assert self._go_on.wait(LIMIT_SECONDS)

    def go_on(self) -> Result:
        self._go_on.set()
        return self.result.result(LIMIT_SECONDS)


@pytest.mark.slow
def test_text_is_encoded_beside_the_steps_of_another(toy_artifact: Path, threads: ThreadPoolExecutor) -> None:
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        held, timings = Held(pipeline, threads), Timings()
        waiting = threads.submit(pipeline.generate, "an owl", num_steps=2, timings=timings)
        assert eventually(lambda: "text" in timings.seconds, LIMIT_SECONDS)
        assert threads.submit(pipeline.encode_prompts, ["a hare"]).result(LIMIT_SECONDS).any()
        assert not waiting.done() and timings.step_seconds == []
        held.go_on()
        waiting.result(LIMIT_SECONDS)
    ((asked, had),) = timings.spans["wait"]
    ((encoded, _),) = timings.spans["text"]
    assert encoded < asked < had < timings.spans["prepare"][0][0]
    assert "wait" not in held.result.result().timings.seconds


@pytest.mark.slow
def test_where_memory_is_low_text_waits_too(toy_artifact: Path, threads: ThreadPoolExecutor) -> None:
    with wanrun.load(toy_artifact, embeddings="none", memory="low") as pipeline:
        held, timings = Held(pipeline, threads), Timings()
        waiting = threads.submit(pipeline.encode_prompts, ["an owl"], timings)
        assert eventually(lambda: len(pipeline._turns._queue) == 2, LIMIT_SECONDS)
        assert not waiting.done() and "text" not in timings.seconds
        assert "text_encoder" not in {span.label for span in timings.labelled_spans}
        held.go_on()
        assert waiting.result(LIMIT_SECONDS).any()
        assert "text_encoder" in {span.label for span in timings.labelled_spans}
        assert timings.seconds.keys() >= {"wait", "text"}


@pytest.mark.slow
def test_close_during_a_generation(toy_artifact: Path, threads: ThreadPoolExecutor) -> None:
    """It ends as it would have; those behind it and later ones are refused."""
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        expected = pipeline.generate(PROMPT, num_steps=5, seed=9)
    pipeline = wanrun.load(toy_artifact, embeddings="none")
    held, timings = Held(pipeline, threads), Timings()
    behind = threads.submit(pipeline.generate, "an owl", num_steps=2, timings=timings)
    assert eventually(lambda: "text" in timings.seconds, LIMIT_SECONDS)
    closing = threads.submit(pipeline.close)
    error = behind.exception(LIMIT_SECONDS)
    assert isinstance(error, UsageError) and error.code == "closed"
    assert not closing.done() and timings.step_seconds == []
    assert same(held.go_on(), expected)
    closing.result(LIMIT_SECONDS)
    with refuses("closed", remedy="load"):  # as is every call: test_arguments.py
        pipeline.generate(PROMPT)


@pytest.mark.slow
def test_from_on_step(toy_artifact: Path) -> None:
    """What would wait for itself is refused; the generation is not disturbed by that."""
    told: list[str] = []

    def on_step(step: int, total: int) -> None:
        for call in (lambda: pipeline.generate(PROMPT, num_steps=1), pipeline.close):
            with refuses("busy", remedy="on_step") as caught:
                call()
            told.append(str(caught.value))
        assert pipeline.encode_prompts([PROMPT]).any()

    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        expected = pipeline.generate(PROMPT, num_steps=2)
        assert same(pipeline.generate(PROMPT, num_steps=2, on_step=on_step), expected)
    assert len(told) == 4


@pytest.mark.slow
def test_an_error_in_one_thread(toy_artifact: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """A callback that raises, an option that there is not, and a text encoder that is damaged."""
    artifact = linked(toy_artifact, tmp_path / "artifact")
    with wanrun.load(artifact) as pipeline:  # into the cache
        expected = pipeline.generate(PROMPT, "", num_steps=5)
    own(artifact, "weights")
    flip(artifact / "weights/text_encoder/shared/c/0/0", 99)

    def fail(step: int, total: int) -> None:
        if step == 2:
            raise WanError("failed", "stop")

    with wanrun.load(artifact, prompts=[PROMPT, ""]) as pipeline:
        for _ in range(2):
            failing = {
                WanError: threads.submit(pipeline.generate, PROMPT, "", num_steps=5, on_step=fail),
                UsageError: threads.submit(pipeline.generate, PROMPT, "", num_steps=5, solver="none"),
                ArtifactError: threads.submit(pipeline.generate, "nobody knew", "", num_steps=5),
            }
            working = threads.submit(pipeline.generate, PROMPT, "", num_steps=5)
            assert same(working.result(LIMIT_SECONDS), expected)
            for kind, future in failing.items():
                assert type(future.exception(LIMIT_SECONDS)) is kind
        assert same(pipeline.generate(PROMPT, "", num_steps=5), expected)
