"""Several threads with one pipeline, or one each; forks: one at a time, in the order of arrival."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
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
from helpers.refusals import check_refusal, refuses
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.generation.turns import Turns
from wanrun.media.inputs import Media
from wanrun.timing.timings import Timings


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Holder:
    """A thread that has the device until it is told to let go."""

    def __init__(self, turns: Turns, threads: ThreadPoolExecutor) -> None:
        self._let_go, self.has = threading.Event(), threading.Event()
        self._turns = turns
        self._done = threads.submit(self._hold)
        assert self.has.wait(LIMIT_SECONDS)

    def _hold(self) -> None:
        with self._turns.call(), self._turns.turn() as waited:
            assert not waited
            self.has.set()
            self._let_go.wait(LIMIT_SECONDS)

    def let_go(self) -> None:
        self._let_go.set()
        self._done.result(LIMIT_SECONDS)


def arrive(
    turns: Turns, threads: ThreadPoolExecutor, work: Callable[[bool], Any], position: int
) -> Future[Any]:
    """Asks for the device in another thread, and returns when that is the one at this position."""

    def run() -> Any:
        with turns.call(), turns.turn() as waited:
            return work(waited)

    future = threads.submit(run)
    assert eventually(lambda: len(turns._queue) == position + 1, LIMIT_SECONDS)
    return future


def test_in_the_order_of_arrival(threads: ThreadPoolExecutor) -> None:
    turns, served = Turns(), list[int]()
    holder = Holder(turns, threads)
    futures = [
        arrive(turns, threads, lambda waited, n=n: served.append(n if waited else -1), 1 + n)  # type: ignore[misc]
        for n in range(10)
    ]
    assert served == []
    holder.let_go()
    for future in futures:
        future.result(LIMIT_SECONDS)
    assert served == list(range(10))
    with turns.turn() as waited:
        assert not waited


def test_a_thread_that_fails_lets_the_next_in(threads: ThreadPoolExecutor) -> None:
    turns = Turns()
    holder = Holder(turns, threads)

    def fail(waited: bool) -> None:
        raise RuntimeError("no")

    failing, working = arrive(turns, threads, fail, 1), arrive(turns, threads, lambda waited: "made", 2)
    holder.let_go()
    assert isinstance(failing.exception(LIMIT_SECONDS), RuntimeError)
    assert working.result(LIMIT_SECONDS) == "made"


def test_an_interrupt_while_waiting_leaves_the_queue(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    holder = Holder(turns, threads)

    def interrupt(*arguments: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), turns.call(), turns.turn():
            raise AssertionError("it waits")
    assert len(turns._queue) == 1
    waiting = arrive(turns, threads, lambda waited: waited, 1)
    holder.let_go()
    assert waiting.result(LIMIT_SECONDS) is True
    assert not turns._calls and not turns._queue


def test_the_device_is_not_asked_for_twice_by_one_thread() -> None:
    turns = Turns()
    with turns.call(), turns.turn():
        with refuses("busy", what="a generation"), turns.call(), turns.turn():
            raise AssertionError("it waits for itself")
        with turns.call():  # which needs no device
            pass
        with refuses("busy", what="a call", remedy="close"):
            turns.close()
    with turns.call(), turns.turn() as waited:
        assert not waited
    turns.close()


def test_close(threads: ThreadPoolExecutor) -> None:
    """It waits for the call that has the device and for those that need none, and refuses the others."""
    turns, reading = Turns(), threading.Event()
    holder = Holder(turns, threads)
    waiting = arrive(turns, threads, lambda waited: "made", 1)

    def read() -> str:
        with turns.call():
            reading.wait(LIMIT_SECONDS)
            return "read"

    needs_none = threads.submit(read)
    assert eventually(lambda: len(turns._calls) == 3, LIMIT_SECONDS)
    closing = threads.submit(turns.close)
    error = waiting.exception(LIMIT_SECONDS)
    assert isinstance(error, UsageError)
    check_refusal(error, "closed", remedy="load")
    assert not closing.done()
    holder.let_go()
    time.sleep(0.05)
    assert not closing.done()
    with refuses("closed"), turns.call():
        raise AssertionError("it is let in")
    reading.set()
    closing.result(LIMIT_SECONDS)
    assert needs_none.result(LIMIT_SECONDS) == "read"
    turns.close()  # once more


def test_a_call_that_is_late_for_the_device(threads: ThreadPoolExecutor) -> None:
    """It read its images while the pipeline was being closed."""
    turns, closed = Turns(), threading.Event()

    def call() -> None:
        with turns.call():
            closed.wait(LIMIT_SECONDS)
            with turns.turn():
                raise AssertionError("it has the device")

    late = threads.submit(call)
    assert eventually(lambda: len(turns._calls) == 1, LIMIT_SECONDS)
    closing = threads.submit(turns.close)
    assert eventually(lambda: turns._closed, LIMIT_SECONDS)
    closed.set()
    assert isinstance(late.exception(LIMIT_SECONDS), UsageError)
    closing.result(LIMIT_SECONDS)


# With a pipeline.


PROMPT = "a fox in the snow"
STEPS: Mapping[str, Any] = {"num_steps": 4, "flow_shift": 3.0, "boundary": 0.8}


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
        time.sleep(0.5)
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


# Forks of a process that has loaded an artifact.


FORKING = """
import multiprocessing, os, sys, threading, time, warnings
import numpy as np
import wanrun
from wanrun.errors import UsageError

warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, at a fork
artifact, how = sys.argv[1:]

def refused(call):
    started = time.monotonic()
    try:
        call()
    except UsageError as error:
        assert time.monotonic() - started < 5
        print(error, flush=True)
    else:
        raise AssertionError("it is not refused")

def child(pipeline):
    refused(lambda: pipeline.generate("a fox"))
    refused(pipeline.warmup)
    refused(lambda: pipeline.encode_prompts(["a fox"]))
    refused(lambda: pipeline.component_weights("vae"))
    refused(lambda: wanrun.load(artifact))
    refused(pipeline.__enter__)
    pipeline.close()
    pipeline.__exit__(None, None, None)

def forked(pipeline):
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child, args=(pipeline,))
        process.start()
        process.join(60)
        return process.exitcode
    number = os.fork()
    if number == 0:
        try:
            child(pipeline)
        except BaseException:
            os._exit(1)
        os._exit(0)  # as multiprocessing: XLA's own end fails without its threads
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

with wanrun.load(artifact, embeddings="none") as pipeline:
    expected = pipeline.generate("a fox", num_steps=2).latents
    codes = []
    def fork_once(step, total):  # while a thread has the device, and locks are held
        codes.append(forked(pipeline))
    found = pipeline.generate("a fox", num_steps=2, on_step=fork_once).latents
    assert codes == [0, 0], codes
    assert forked(pipeline) == 0
    assert np.array_equal(found, expected)
    assert np.array_equal(pipeline.generate("a fox", num_steps=2).latents, expected)
print("done")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["multiprocessing", "fork"])
def test_a_fork_after_load(toy_artifact: Path, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(toy_artifact), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the fork that hangs
        process.communicate()
        raise
    assert process.returncode == 0, err
    *lines, last = out.splitlines()
    assert last == "done" and len(lines) == 3 * 6
    for number, line in enumerate(lines):
        assert line.startswith("JAX " if number % 6 == 4 else "the pipeline ") and " spawn" in line
        assert f" process {process.pid};" in line


def test_a_lock_that_is_held_when_a_process_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it."""
    turns, own = Turns(), os.getpid()
    assert not turns.forked
    with turns._changed:
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        assert turns.forked
        for call in (lambda: turns.call().__enter__(), turns.close):
            with refuses("closed", expected=own, found=own + 1, remedy="spawn"):
                call()
