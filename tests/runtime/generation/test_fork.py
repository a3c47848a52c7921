"""A fork of a process that has loaded an artifact: its calls are refused at once, and the parent goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.generation.turns import Turns

PROGRAM = """
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
        [sys.executable, "-c", PROGRAM, str(toy_artifact), how],
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
