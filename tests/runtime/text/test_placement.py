"""The text encoder on the CPU, beside a target that is not: here one that looks as if it had another chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, build_elsewhere, put_executable
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.opened.policy import LoadPolicy
from wanrun.replay.proof import check_all_ran
from wanrun.text.placement import cpu_target

PROMPTS = ["a fox", "a fox in the snow " * 20]
OPTIONS: dict[str, Any] = {"lazy": True, "trial": True, "embeddings": "none", "text_encoder_device": "cpu"}


@pytest.fixture
def both(artifact: Path) -> Path:
    """The toy artifact with its CPU target, and one that was built elsewhere."""
    build_elsewhere(artifact, beside=True)
    return artifact


def components(pipeline: Pipeline) -> tuple[set[str], set[str]]:
    """The components that are loaded where programs run, and for the text encoder on the CPU."""
    beside = pipeline._texts._beside
    return set(pipeline._weights._weights), set() if beside is None else set(beside._weights)


@pytest.mark.slow
def test_the_cpu_s_program_encodes(both: Path) -> None:
    for name in ("encode_text_64", "encode_text_128"):
        put_executable(both, name, b"is not loaded")
    with load(both, target="cpu", embeddings="none", lazy=True) as pipeline:
        expected = pipeline.encode_prompts(PROMPTS)
        video = pipeline.generate("a fox", num_steps=2).frames
    with load(both, target=TARGET, **OPTIONS) as pipeline:
        assert np.array_equal(pipeline.encode_prompts(PROMPTS), expected)
        assert components(pipeline) == (set(), {"text_encoder"})
        assert np.array_equal(pipeline.generate("a fox", num_steps=2).frames, video)
        assert components(pipeline) == ({"transformer", "vae"}, {"text_encoder"})
        beside = pipeline._texts._beside
        assert beside is not None and beside.opened.selected.name == "cpu"
        check_all_ran(pipeline, [pipeline._session.loop])  # the target's own text encoder has not
        assert pipeline._session.text.encoder.made_by()["environment"] == beside.opened.environment


def test_on_the_cpu_itself_nothing_is_beside(both: Path) -> None:
    with load(both, target="cpu", **OPTIONS) as pipeline:
        assert pipeline._texts._beside is None
    with load(both, target=TARGET, **{**OPTIONS, "text_encoder_device": None}) as pipeline:
        assert pipeline._texts._beside is None


def test_without_a_cpu_target(elsewhere: Path) -> None:
    with refuses("not_built", ArtifactError, what=PROFILE, found=TARGET, remedy="--target cpu") as caught:
        load(elsewhere, **OPTIONS)
    assert caught.value.fields == ("text_encoder_device",)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"cpu_features": ["warp_drive"]}, "warp_drive"),
        ({"device_kind": "TPU v9"}, "TPU v9"),
    ],
)
def test_a_cpu_target_of_another_machine(both: Path, facts: dict[str, Any], reason: str) -> None:
    manifest = read_manifest(both)
    target = manifest.targets["cpu"]
    target = msgspec.structs.replace(target, environment={**target.environment, **facts})
    manifest.changed(targets={**manifest.targets, "cpu": target}).write(both)
    with refuses("wrong_machine", ArtifactError, what=reason) as caught:
        load(both, target=TARGET, **OPTIONS)
    assert caught.value.what.startswith("target cpu, for the text encoder")


def test_the_nearest_cpu_target_is_taken(both: Path) -> None:
    manifest = read_manifest(both)
    profile, target = manifest.profiles[PROFILE], manifest.targets["cpu"]
    other = msgspec.structs.replace(
        target, environment={**target.environment, "cpu_features": ["warp_drive"]}
    )
    manifest = manifest.changed(targets={**manifest.targets, "a": other})
    assert cpu_target(Artifact(manifest, both), profile).name == "cpu"


def test_the_option_has_one_value() -> None:
    LoadPolicy().check()
    with refuses("invalid_value", what="'cuda:1'", expected="cpu") as caught:
        LoadPolicy(text_encoder_device="cuda:1").check()
    assert caught.value.fields == ("text_encoder_device",)
