"""The text stage: an artifact's encoder, where embeddings come from, and the CPU's program for a chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec import structs

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, build_elsewhere, put_executable
from helpers.fake_programs import FakeProgram, FakePrograms
from helpers.opened import Opened
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.opened.policy import LoadPolicy
from wanrun.replay.proof import check_all_ran
from wanrun.text.artifact_encoder import ArtifactTextEncoder, embedding_stores, text_programs
from wanrun.text.embedding_cache import EmbeddingCache
from wanrun.text.embeddings import ArtifactEmbeddings
from wanrun.text.placement import cpu_target
from wanrun.text.stage import TextStages
from wanrun.timing.timings import Timings

# --- artifact encoder ---


LENGTHS: Mapping[str, int] = {"encode_text": 32, "encode_text_16": 16, "encode_text_4": 4}
LENGTH, WIDTH = 32, 3


def encode(ids: np.ndarray, mask: np.ndarray) -> Mapping[str, np.ndarray]:
    """The ids of a prompt, WIDTH times."""
    assert ids.shape == mask.shape and ids.shape[0] == 1
    return {"embeddings": np.repeat(ids[..., None] * 1.0, WIDTH, axis=-1)}


@pytest.fixture
def loaded() -> FakePrograms:
    return FakePrograms(denoise_step=FakeProgram(()), **{name: encoder_of(name) for name in LENGTHS})


def encoder_of(name: str, digest: str | None = None) -> FakeProgram:
    tokens = {"ids": ("int32", (1, LENGTHS[name]))}
    return FakeProgram(("ids", "mask"), tokens, encode, digest or f"of {name}", "text")


@pytest.fixture
def encoder(loaded: FakePrograms) -> ArtifactTextEncoder:
    return ArtifactTextEncoder(cast(Any, loaded), {"platform": "cpu"})


def prompts(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids 1, 2, 3 ... of prompts of these lengths, and the mask."""
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int32)
    return mask * np.arange(1, LENGTH + 1, dtype=np.int32), mask


def test_programs_by_their_length(loaded: FakePrograms) -> None:
    found = text_programs(cast(Any, loaded))
    assert list(found.items()) == [(4, "encode_text_4"), (16, "encode_text_16"), (32, "encode_text")]


def test_a_prompt_runs_through_the_shortest_program_that_holds_it(
    encoder: ArtifactTextEncoder, loaded: FakePrograms
) -> None:
    ids, mask = prompts(1, 4, 5, 17, 32)
    embeddings = encoder(ids, mask)
    assert [arguments["ids"].shape for _, arguments in loaded.calls] == [(1, n) for n in (4, 4, 16, 32, 32)]
    assert embeddings.shape == (5, LENGTH, WIDTH)
    assert np.array_equal(embeddings[..., 0], ids)  # and zeros behind a shorter program's rows


def test_what_is_asked_for(encoder: ArtifactTextEncoder, loaded: FakePrograms) -> None:
    every = ["encode_text_4", "encode_text_16", "encode_text"]
    encoder.request()
    encoder.request([3, 9, 2])
    encoder.release()
    assert loaded.calls == [
        ("request", (every, ["text_encoder"])),
        ("request", (every[:2], ["text_encoder"])),
        ("release", "text_encoder"),
    ]


def test_a_warm_up_runs_every_program_once(encoder: ArtifactTextEncoder, loaded: FakePrograms) -> None:
    encoder.warm_up()
    assert loaded.names == ["encode_text_4", "encode_text_16", "encode_text"]


def test_what_made_them_depends_on_the_programs_and_the_machine(loaded: FakePrograms) -> None:
    def made_by(platform: str = "cpu") -> Any:
        return ArtifactTextEncoder(cast(Any, loaded), {"platform": platform}).made_by()

    first = made_by()
    loaded.programs["denoise_step"] = FakeProgram((), sha256="another", role="step")  # which encodes no text
    assert made_by() == first != made_by("cuda")
    loaded.programs["encode_text_4"] = encoder_of("encode_text_4", "another")
    assert made_by() != first


@pytest.mark.parametrize(
    ("which", "kinds"),
    [("none", []), ("artifact", [ArtifactEmbeddings]), ("all", [ArtifactEmbeddings, EmbeddingCache])],
)
def test_where_embeddings_may_be_taken_from(
    encoder: ArtifactTextEncoder, toy_artifact: Path, which: str, kinds: list[type]
) -> None:
    manifest, policy = read_manifest(toy_artifact), LoadPolicy(embeddings=which)
    opened = SimpleNamespace(
        artifact=Artifact(manifest, toy_artifact), manifest=manifest, policy=policy, warn=print
    )
    stores = embedding_stores(cast(Any, opened), encoder)
    assert [type(store) for store in stores] == kinds


# --- stage ---


@pytest.fixture
def opened(toy_artifact: Path) -> Iterator[Opened]:
    opened = Opened(toy_artifact)
    yield opened
    opened.close()


def test_profiles_share_a_stage(opened: Opened) -> None:
    """Those whose embeddings have the same bits."""
    stages, programs = TextStages(opened.opened), opened.programs()
    stage = stages.of(programs, "float32")
    assert stages.of(opened.programs(), "float32") is stage
    other = stages.of(programs, "bfloat16")
    assert other is not stage and other.tokenizer is stage.tokenizer
    assert (stage.blank(2).dtype, other.blank(1).dtype.name) == (np.float32, "bfloat16")
    assert stage.blank(2).shape == (2, 512, 32)
    changed = structs.replace(programs["encode_text_64"], sha256="0" * 64)
    assert stages.of({**programs, "encode_text_64": changed}, "float32") is not stage  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_low_memory_lets_go_of_the_encoder(opened: Opened, reads: list[str], memory: str) -> None:
    policy = msgspec.structs.replace(opened.opened.policy, memory=memory, embeddings="none")
    record = dataclasses.replace(opened.opened, policy=policy)
    stage, timings = TextStages(record).of(opened.programs(), "float32"), Timings()
    for prompt in ("a fox", "an owl"):
        assert stage.encode([prompt], timings).any()
    assert len(timings.spans["text"]) == 2
    assert reads == ["text_encoder"] * (2 if memory == "low" else 1)


# --- beside ---


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
