"""What the processes of a group agree on before they load, and before each generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from helpers.options import PROFILE, generation, options
from helpers.refusals import refuses
from wanrun.artifact.manifest import read_manifest
from wanrun.cluster.process_group import ProcessGroup
from wanrun.generation.agreement import agree_on_generation, together
from wanrun.opened.policy import LoadPolicy


class Noting:
    """A group that notes what is to be agreed on."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def agree_on_artifact(self, facts: dict[str, Any]) -> None:
        self.facts.append(facts)

    agree_on_request = agree_on_artifact


def load(toy_artifact: Path, group: Noting | None, policy: LoadPolicy) -> LoadPolicy:
    manifest = read_manifest(toy_artifact)
    (profile,) = manifest.profiles.values()
    return together(cast(ProcessGroup, group), manifest, "cpu", profile, policy, ["a fox"], None)


def test_alone_nothing_changes(toy_artifact: Path) -> None:
    policy = LoadPolicy(allow_compile=True)
    assert load(toy_artifact, None, policy) is policy
    agree_on_generation(None, cast(Any, None), None, None)


def test_all_load_the_same(toy_artifact: Path) -> None:
    """The user's embeddings are left out: one host may have a prompt that another has to encode."""
    group = Noting()
    assert load(toy_artifact, group, LoadPolicy()).embeddings == "artifact"
    artifact, request = group.facts
    assert artifact["target"] == "cpu" and artifact["content digest"].startswith("sha256:")
    assert request["prompts"] == ["a fox"] and request["transfer"] == "auto"
    assert "weights" not in request  # each host has its own folder
    assert load(toy_artifact, group, LoadPolicy(embeddings="none")).embeddings == "none"


@pytest.mark.parametrize("option", [{"allow_compile": True}, {"text_encoder_device": "cpu"}])
def test_nothing_is_done_that_hosts_may_do_otherwise(toy_artifact: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with refuses("conflict", what=name):
        load(toy_artifact, Noting(), LoadPolicy(**option))


def test_all_make_the_same_video() -> None:
    group = Noting()
    for latents in (None, np.zeros((1, 2)), np.ones((1, 2))):
        agree_on_generation(cast(ProcessGroup, group), generation(seed=3), None, latents)
    assert [facts["seed"] for facts in group.facts] == [3] * 3
    assert group.facts[0].items() >= {"profile": PROFILE.name, **options(seed=3)}.items()
    assert group.facts[0]["latents"] is None
    assert group.facts[1]["latents"] != group.facts[2]["latents"]
