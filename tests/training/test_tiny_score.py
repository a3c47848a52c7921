"""What the tiny checkpoints draw with the default dtypes: a bad video fails, whatever its tensors are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tinywan import checkpoint
from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.judge import Verdict, judge
from tinywan.yardstick import captions

import wanrun
from helpers.artifacts import LONG_TEXTS, compile_fast, shared
from wanbuild.build import convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.console import run

pytestmark = pytest.mark.thorough

LEAST = 0.95
"""Of the mean score of the first captions; of all of them the benchmark says it."""

TEXTS = [text for text, _ in captions()[:4]]
DEMO = "a red ball rolls to the right over green ground"
STEPS: Mapping[str, Any] = {"num_steps": 20}
FOUR_STEPS = checkpoint.FOLDER / "four-steps"


def built(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(target: Path) -> None:
        convert(ConvertRequest(checkpoint.FOLDER / variant, target))
        steps = BuildOptions(loop="step")
        request = CompileRequest(target, ["cpu"], [(WIDTH, HEIGHT)], [FRAMES], [True], options=steps)
        compile_fast(request, LONG_TEXTS)

    return shared(tmp_path_factory, f"tiny-{variant}", build)


def judged(
    variant: str, artifact: Path, texts: Sequence[str], options: Mapping[str, Any] = STEPS
) -> list[Verdict]:
    """Returns what the judge says of a video of each text, and prints it."""
    verdicts = []
    with wanrun.load(artifact, embeddings="none") as pipeline:
        for text in texts:
            made = pipeline.generate(text, media=checkpoint.media(variant, text), **options)
            verdicts.append(judge(made.frames[0], text))
            flaws = ", ".join(f"{flaw.name} {flaw}" for flaw in verdicts[-1].flaws)
            print(f"{verdicts[-1].score:.2f}  {text}: {flaws}")
    return verdicts


def mean_score(verdicts: Sequence[Verdict]) -> float:
    return float(np.mean([verdict.score for verdict in verdicts]))


@pytest.mark.parametrize("variant", checkpoint.names())
def test_videos_show_what_their_captions_say(
    variant: str, tmp_path_factory: pytest.TempPathFactory, record_property: pytest.RecordProperty
) -> None:
    verdicts = judged(variant, built(variant, tmp_path_factory), TEXTS)
    record_property("score", mean_score(verdicts))
    assert mean_score(verdicts) >= LEAST
    assert not any(verdict.badly_drawn for verdict in verdicts)


def test_a_sampler_that_is_broken_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Too few steps: what the demo's caption says is there, as it is after all steps, and badly drawn."""
    artifact = built("wan2.1-t2v", tmp_path_factory)
    (whole,), (few,) = (judged("wan2.1-t2v", artifact, [DEMO], {"num_steps": steps}) for steps in (30, 6))
    assert (whole.score, whole.badly_drawn) == (1, [])
    assert few.score == 1
    assert "stains" in [flaw.name for flaw in few.badly_drawn]


def test_a_student_needs_four_steps(
    tmp_path_factory: pytest.TempPathFactory, record_property: pytest.RecordProperty
) -> None:
    """The distilled 2.1, with the options that the conversion has recorded: no guidance, four evaluations."""

    def build(target: Path) -> None:
        arguments = ["--lora", FOUR_STEPS / "wan2.1-t2v.safetensors", "--sampling", "lightning-4"]
        arguments = ["convert", checkpoint.FOLDER / "wan2.1-t2v", "--artifact", target, *arguments]
        assert run(wanbuild, list(map(str, arguments))) == 0
        steps = BuildOptions(loop="step")
        request = CompileRequest(target, ["cpu"], [(WIDTH, HEIGHT)], [FRAMES], [False], options=steps)
        compile_fast(request, LONG_TEXTS)

    artifact = shared(tmp_path_factory, "tiny-four-steps", build)
    verdicts = judged("wan2.1-t2v", artifact, TEXTS, {})
    record_property("score", mean_score(verdicts))
    assert mean_score(verdicts) >= LEAST
    assert not any(verdict.badly_drawn for verdict in verdicts)


def _silence(folder: Path, layer: str) -> None:
    """Lets a layer of every block of the transformer give zeros."""
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    silenced = [name for name in weights if f".{layer}." in name]
    assert silenced
    save_file(weights | {name: np.zeros_like(weights[name]) for name in silenced}, file, {"format": "pt"})


BREAKAGES: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "self-attention gives zeros": ("wan2.1-t2v", lambda folder: _silence(folder, "attn1.to_out")),
    "cross-attention gives zeros": ("wan2.1-t2v", lambda folder: _silence(folder, "attn2.to_out")),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_score_notices_a_broken_model(
    breakage: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: pytest.RecordProperty,
) -> None:
    variant, break_it = BREAKAGES[breakage]
    shutil.copytree(checkpoint.FOLDER / variant, tmp_path / "checkpoint")
    break_it(tmp_path / "checkpoint")
    shutil.copytree(built(variant, tmp_path_factory), tmp_path / "artifact")
    convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "artifact", force=True))  # keeps programs
    mean = mean_score(judged(variant, tmp_path / "artifact", TEXTS[:3]))
    record_property("score", mean)
    assert mean < 0.8
