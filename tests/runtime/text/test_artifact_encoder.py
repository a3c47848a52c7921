"""Text encoders: which program a prompt runs through, what is asked for, and where embeddings come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.fake_programs import FakeProgram, FakePrograms
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.opened.policy import LoadPolicy
from wanrun.text.artifact_encoder import ArtifactTextEncoder, embedding_stores, text_programs
from wanrun.text.embedding_cache import EmbeddingCache
from wanrun.text.embeddings import ArtifactEmbeddings

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
