"""What the tiny checkpoints draw with the default dtypes: a wrong video fails, whatever its tensors are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinywan import checkpoint
from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.judge import judge
from tinywan.yardstick import captions

import wanrun
from helpers.artifacts import shared
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.programs.compile import CompileRequest, compile_artifact

LEAST = 0.95
"""Of the mean score of the first captions; of all of them the benchmark says it."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", checkpoint.names())
def test_videos_show_what_their_captions_say(
    variant: str, tmp_path_factory: pytest.TempPathFactory, record_property: pytest.RecordProperty
) -> None:
    def build(folder: Path) -> None:
        convert(ConvertRequest(checkpoint.FOLDER / variant, folder))
        compile_artifact(CompileRequest(folder, ["cpu"], [(WIDTH, HEIGHT)], [FRAMES], [True]), print)

    scores = {}
    with wanrun.load(shared(tmp_path_factory, f"tiny-{variant}", build), embeddings="none") as pipeline:
        for text, _ in captions()[:12]:
            made = pipeline.generate(text, media=checkpoint.media(variant, text), num_steps=30)
            scores[text] = judge(made.frames[0], text).score
    for text, score in scores.items():
        print(f"{score:.2f}  {text}")
    mean = float(np.mean(list(scores.values())))
    record_property("score", mean)
    assert mean >= LEAST
