"""The artifact's tokenizer: the same tokens from a process beside this one, and from this one if it fails."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.damage import flip, own
from helpers.refusals import refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.errors import ArtifactError
from wanrun.text import tokenizer as module
from wanrun.text.tokenizer import ArtifactTokenizer, PromptTokenizer

TEXTS = ["a red fox", "", "snow & 猫 " * 400, 'quotes " and \\ lines\n']


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every tokenizer is large; the processes that were started."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(module, "LARGE_BYTES", 1)
    monkeypatch.setattr(module.subprocess, "Popen", start)
    return started


def make(artifact: Path) -> ArtifactTokenizer:
    return ArtifactTokenizer(open_artifact(artifact))


def same(tokenizer: ArtifactTokenizer, artifact: Path, texts: list[str]) -> bool:
    found, expected = tokenizer(texts), PromptTokenizer(artifact / "tokenizer/tokenizer.json", 512)(texts)
    assert found.ids.dtype == found.mask.dtype == np.int32
    assert np.array_equal(found.ids, expected.ids) and np.array_equal(found.mask, expected.mask)
    return found.lengths == expected.lengths and found.cut == expected.cut


def test_the_same_tokens_without_loading_it_here(
    toy_artifact: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(toy_artifact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArtifactTokenizer, "load", None)
        tokenizer.start(TEXTS)
        assert same(tokenizer, toy_artifact, TEXTS)
        assert same(tokenizer, toy_artifact, TEXTS)  # remembered
    assert same(tokenizer, toy_artifact, TEXTS[:1])
    assert [process.returncode for process in processes] == [0]


@pytest.mark.usefixtures("processes")
def test_other_prompts_than_announced(toy_artifact: Path) -> None:
    tokenizer = make(toy_artifact)
    tokenizer.start(TEXTS[:1])
    assert same(tokenizer, toy_artifact, TEXTS)


@pytest.mark.parametrize("failure", ["killed", "no such program", "no memory for a process"])
def test_a_process_that_fails(
    toy_artifact: Path,
    processes: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
) -> None:
    tokenizer = make(toy_artifact)
    if failure == "no such program":
        monkeypatch.setattr(module.sys, "executable", "/nowhere/python")
    elif failure == "no memory for a process":

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(module.subprocess, "Popen", fail)
    tokenizer.start(TEXTS)
    if failure == "killed":
        while not processes:
            time.sleep(0.01)
        processes[0].kill()
    assert same(tokenizer, toy_artifact, TEXTS)


def test_a_small_one_needs_no_process(toy_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", None)
    tokenizer = make(toy_artifact)
    tokenizer.start(TEXTS)
    assert same(tokenizer, toy_artifact, TEXTS)


@pytest.mark.usefixtures("processes")
def test_damage_is_found_before_it_is_read(artifact: Path) -> None:
    own(artifact, "tokenizer")
    flip(artifact / "tokenizer/tokenizer.json", 1000)
    tokenizer = make(artifact)
    for call in (lambda: tokenizer.start(TEXTS), tokenizer.load, lambda: tokenizer(TEXTS)):
        with refuses("damaged", ArtifactError, what="tokenizer/tokenizer.json", expected="sha256 "):
            call()
