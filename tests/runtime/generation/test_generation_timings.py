"""Timings belong to a generation: its own spans and steps, what was loaded meanwhile; nothing grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import wanrun
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.timing.timings import Timings

pytestmark = pytest.mark.slow

PROMPT = "a fox in the snow"


@pytest.fixture
def pipeline(toy_artifact: Path) -> Iterator[Pipeline]:
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        yield pipeline


def test_a_result_has_its_own(pipeline: Pipeline) -> None:
    while (loaded := pipeline.timings.as_json())["process_to_ready_seconds"] is None:
        time.sleep(0.01)  # a thread of the loader says it, perhaps after load has returned
    moved = {span.name: span.nbytes for span in pipeline.timings.labelled_spans if span.nbytes}
    assert moved["restore transformer"] == moved["transfer transformer"] > 0
    assert moved["executables denoise_step"] > 0
    assert 0 < loaded["executables_floor_seconds"] <= loaded["executables_seconds"]
    known = {"executables": pipeline.timings.rates["executables"]}  # a toy's weights are too few to tell
    with wanrun.load(pipeline.artifact, embeddings="none") as again:
        assert again.timings.known_rates == known
    results = []
    for steps in (3, 2):
        started = time.monotonic()
        timings = pipeline.generate(PROMPT, num_steps=steps).timings
        elapsed = time.monotonic() - started
        total = timings.as_json()["total_seconds"]
        assert 0.8 * elapsed < total <= elapsed
        assert len(timings.step_seconds) == steps and timings.loop == "step"
        assert timings.unaccounted_seconds is not None and timings.unaccounted_seconds < elapsed
        results.append(timings)
    first, second = ({span.name for span in timings.labelled_spans} for timings in results)
    # The first brought what comes behind the steps.
    assert second == {"text", "prepare", "denoise", "decode 9 frames"}
    decoder = {f"executables decode_{name}" for name in ("first", "video")}
    assert first - second == {"restore vae", "transfer vae", *decoder}
    assert [timings.cache_hits for timings in results] == [2, 0]
    begins = [min(span.start for span in timings.labelled_spans) for timings in results]
    ends = [max(span.end for span in timings.labelled_spans) for timings in results]
    assert loaded["process_to_ready_seconds"] < begins[0] < ends[0] < begins[1] < ends[1]
    after = pipeline.timings.as_json()
    for key in ("spans", "step_seconds", "cache_hits", "process_to_first_step_seconds"):
        assert after[key] == loaded[key]
    assert results[0].as_json().keys() == Timings().as_json().keys() | {"prepare_seconds"}


def test_given_ones_collect(pipeline: Pipeline) -> None:
    """As the command line's, which also have the start of the process in them."""
    timings = Timings()
    for _ in range(2):
        assert pipeline.generate(PROMPT, num_steps=2, timings=timings).timings is timings
    assert len(timings.step_seconds) == 4 and len(timings.spans["decode"]) == 2
    before = timings.as_json()["total_seconds"]
    time.sleep(0.01)
    assert timings.as_json()["total_seconds"] > before + 0.009


def test_the_other_calls(pipeline: Pipeline) -> None:
    timings = Timings()
    pipeline.encode_prompts([PROMPT], timings)
    pipeline.decode(np.zeros(pipeline.latents_shape, np.float32), timings)
    assert timings.seconds.keys() == {"text", "decode", "restore", "transfer", "executables"}
    before = pipeline.timings.as_json()["spans"]
    pipeline.encode_prompts(["an owl"])
    pipeline.decode(np.zeros(pipeline.latents_shape, np.float32))
    pipeline.warmup()
    assert pipeline.timings.as_json()["spans"] == before


def reachable(root: Any) -> int:
    """How many objects hang on one, but for what belongs to modules."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        for other in gc.get_referents(waiting.pop()):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                waiting.append(other)
    return len(seen)


@pytest.mark.thorough
def test_nothing_grows(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of generations, but for their steps, leave a pipeline as large as it was."""
    frames, latents = np.zeros((1, 9, 64, 96, 3), np.uint8), np.zeros(pipeline.latents_shape, np.float32)

    def make(self: Sampler, run: Any, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        with run.timings.phase("denoise"):
            run.timings.steps("step", 1, 0.1)
        return frames, latents

    monkeypatch.setattr(Sampler, "__call__", make)
    sizes = []
    for count in (20, 300):
        for seed in range(count):
            result = pipeline.generate(PROMPT, seed=seed, num_steps=2)
            assert len(result.timings.labelled_spans) == 2
        gc.collect()
        sizes.append(reachable(pipeline))
    print(f"{sizes} objects")
    assert sizes[0] > 1000 and sizes[1] - sizes[0] < 100
