"""One text stage for all profiles whose embeddings have the same bits, and another for any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from helpers.damage import PROFILE
from helpers.opened import Opened
from wanrun.artifact.manifest import read_manifest
from wanrun.text.stage import TextStages
from wanrun.timing.timings import Timings


@pytest.fixture
def opened(toy_artifact: Path) -> Iterator[Opened]:
    opened = Opened(toy_artifact)
    yield opened
    opened.close()


def test_profiles_share_a_stage(opened: Opened) -> None:
    stages, programs = TextStages(opened.opened), opened.programs()
    stage = stages.of(programs, "float32")
    assert stages.of(opened.programs(), "float32") is stage
    other = stages.of(programs, "bfloat16")
    assert other is not stage and other.tokenizer is stage.tokenizer
    assert (stage.blank(2).dtype, other.blank(1).dtype.name) == (np.float32, "bfloat16")
    assert stage.blank(2).shape == (2, 512, 32)


def test_another_text_encoder_is_another_stage(toy_artifact: Path, opened: Opened) -> None:
    profile = read_manifest(toy_artifact).profiles[PROFILE]
    programs = opened.programs()
    stages = TextStages(opened.opened)
    stage = stages.of(programs, profile.options.dtype)
    changed = dict(programs)
    changed["encode_text_64"] = structs.replace(programs["encode_text_64"], sha256="0" * 64)
    assert stages.of(changed, "float32") is not stage  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_low_memory_lets_go_of_the_encoder(opened: Opened, reads: list[str], memory: str) -> None:
    policy = msgspec.structs.replace(opened.opened.policy, memory=memory, embeddings="none")
    record = dataclasses.replace(opened.opened, policy=policy)
    stage, timings = TextStages(record).of(opened.programs(), "float32"), Timings()
    for prompt in ("a fox", "an owl"):
        assert stage.encode([prompt], timings).any()
    assert len(timings.spans["text"]) == 2
    assert reads == ["text_encoder"] * (2 if memory == "low" else 1)
