"""Executables that look right, with digests that fit, are refused if they do not make the recorded video."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from helpers.damage import PROFILE, own
from helpers.doctored_updates import DOCTORED
from helpers.elsewhere import (
    PROXY,
    TARGET,
    build_elsewhere,
    doctored,
    impostor,
    put_executable,
    put_golden,
    record,
)
from wanbuild.models.attention import BlockedAttention
from wanbuild.models.blocks import WanAttention
from wanbuild.programs import denoiser
from wanrun.artifact.manifest import read_manifest
from wanrun.replay.trial import tried
from wanrun.trust.verdict import Verdict


@pytest.fixture
def outcome(elsewhere: Path) -> Callable[[], Verdict]:
    """Tries the artifact; what is told on the way are the two stages."""

    def call() -> Verdict:
        told: list[Verdict] = []
        verdict = tried(elsewhere, TARGET, PROFILE, told.append)
        stages = ["while they were loaded", "while they made the recorded video"]
        assert [one.reason for one in told] == stages[: len(told)]
        assert all(not one.passed and one.keep for one in told)
        return verdict

    return call


@pytest.fixture(scope="module")
def short(toy_artifact: Path) -> dict[str, Any]:
    """The recorded result as older artifacts have it."""
    return record(toy_artifact, steps=2)


def test_right_ones_pass(outcome: Callable[[], Verdict]) -> None:
    """The entries have names that JAX does not look for: its own keys are asked for."""
    verdict = outcome()
    assert verdict.passed and verdict.device == {"device_kind": "cpu", "platform_version": "cpu"}
    assert verdict.reason == "recorded on another kind of machine, relative difference 0.0e+00"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("denoise_loop", "the latents differ from golden/"),
        ("decode_video", "the frames differ from golden/"),
        ("encode_text_128", "the text encoder of 128 tokens differs from the shortest one"),
    ],
)
def test_another_program_of_the_same_signature(
    outcome: Callable[[], Verdict], elsewhere: Path, tmp_path: Path, name: str, reason: str
) -> None:
    put_executable(elsewhere, name, impostor(elsewhere, name))
    verdict = outcome()
    assert not verdict.passed and verdict.keep
    assert verdict.reason.startswith(reason) and "wanbuild" not in verdict.reason


@pytest.mark.parametrize(
    ("name", "wrong"), [("denoise_step", "predictor without m1"), ("denoise_loop", "history exchanged")]
)
def test_an_update_that_an_older_record_does_not_show(
    outcome: Callable[[], Verdict], elsewhere: Path, short: dict[str, Any], name: str, wrong: str
) -> None:
    """Two steps of UniPC do not read its history: their video is right."""
    assert short["steps"] == 2
    put_golden(elsewhere, short)
    patch = mock.patch.object(denoiser, "solver_step", DOCTORED[wrong])
    put_executable(elsewhere, name, doctored(elsewhere, name, patch))
    verdict = outcome()
    assert not verdict.passed and verdict.keep
    assert verdict.reason.startswith(f"{name} makes other steps than the solver's table says"), verdict.reason


def test_bytes_that_are_no_executable(outcome: Callable[[], Verdict], elsewhere: Path) -> None:
    put_executable(elsewhere, "prepare", b"no executable")
    verdict = outcome()
    assert not verdict.passed and verdict.keep
    assert verdict.reason.startswith("JAX cannot load the executable of prepare; ")


def test_a_record_that_differs(
    outcome: Callable[[], Verdict], elsewhere: Path, golden: dict[str, Any]
) -> None:
    put_golden(elsewhere, {**golden, "samples": [value + 0.1 for value in golden["samples"]]})
    verdict = outcome()
    assert not verdict.passed and verdict.keep and verdict.reason.startswith("the latents differ")


def test_a_trial_that_cannot_begin_says_nothing_of_executables(
    outcome: Callable[[], Verdict], elsewhere: Path, golden: dict[str, Any]
) -> None:
    def refused(reason: str) -> None:
        verdict = outcome()
        assert not verdict.passed and not verdict.keep and reason in verdict.reason, verdict.reason

    put_golden(elsewhere, {name: value for name, value in golden.items() if name != "frame_samples"})
    refused("is no recorded result")
    put_golden(elsewhere, None)
    refused("has no recorded result")
    put_golden(elsewhere, golden)
    (elsewhere / read_manifest(elsewhere).golden[PROFILE].file).write_bytes(b"{}")
    refused("is damaged; expected sha256")
    verdict = tried(elsewhere, TARGET, "1x1x1", print)
    assert verdict.reason == f"no profile is named '1x1x1'; expected one of {PROFILE}" and not verdict.keep


def test_another_chip(artifact: Path, golden: dict[str, Any]) -> None:
    put_golden(artifact, golden)
    build_elsewhere(artifact, device_kind="TPU v9", device_kinds=["TPU v9"])
    verdict = tried(artifact, TARGET, PROFILE, print)
    assert not verdict.passed and not verdict.keep
    assert "device kind: expected TPU v9, found cpu" in verdict.reason


def test_damaged_weights_are_no_matter_of_executables(
    outcome: Callable[[], Verdict], elsewhere: Path
) -> None:
    from helpers.damage import flip

    own(elsewhere, "weights")
    flip(max((elsewhere / "weights/vae").rglob("c/*/*"), key=lambda path: path.stat().st_size), 3)
    verdict = outcome()
    assert not verdict.passed and not verdict.keep and "weights are damaged" in verdict.reason, verdict.reason


def tried_by_proxy(artifact: Path) -> Verdict:
    """Tries the profile without a recorded result."""
    return tried(artifact, TARGET, PROFILE, lambda verdict: None)


def test_a_profile_without_a_record_is_tried_by_its_proxy(proxied: Path) -> None:
    told: list[str] = []
    verdict = tried(proxied, TARGET, PROFILE, lambda verdict: told.append(verdict.reason))
    assert verdict.passed, verdict.reason
    own, steps = verdict.reason.split("; ")
    assert own == "recorded on another kind of machine, relative difference 0.0e+00"
    expected = f"the steps of {PROFILE} agree with those of {PROXY} within "
    assert steps.startswith(expected) and float(steps.removeprefix(expected)) < 1e-5
    assert told[2:] == [
        f"while they repeated the tokens of {PROXY}",
        "while programs were compiled here, to be compared",
    ]


def one_key_dropped() -> Any:
    """Attention of the large profile's 72 tokens to 71 of them."""
    own = BlockedAttention.__call__

    def attend(self: BlockedAttention, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        kept = slice(None) if k.shape[1] != 72 else slice(1, None)
        return own(self, q, k[:, kept], v[:, kept], mask)

    return mock.patch.object(BlockedAttention, "__call__", attend)


def rows_permuted() -> Any:
    """The rows of all layers' values lie in another order."""
    own = WanAttention.value
    return mock.patch.object(WanAttention, "value", lambda self, x: jnp.roll(own(self, x), 1, -1))


@pytest.mark.parametrize(
    ("name", "patch", "reason"),
    [
        ("denoise_step", one_key_dropped, f"the steps of {PROFILE} differ from those of {PROXY}"),
        ("prepare", rows_permuted, f"the steps of {PROFILE} differ from those of {PROXY}"),
    ],
)
def test_doctored_steps_of_a_profile_without_a_record(
    proxied: Path, name: str, patch: Callable[[], Any], reason: str
) -> None:
    own(proxied, "executables")
    put_executable(proxied, name, doctored(proxied, name, patch()))
    verdict = tried_by_proxy(proxied)
    assert not verdict.passed and verdict.keep and verdict.reason.startswith(reason), verdict.reason


def test_a_doctored_decoder_of_a_profile_without_a_record(proxied: Path) -> None:
    own(proxied, "executables")
    put_executable(proxied, "decode_video", impostor(proxied, "decode_video"))
    verdict = tried_by_proxy(proxied)
    assert not verdict.passed and verdict.keep
    assert verdict.reason.startswith("decode_video differs from what is compiled here by "), verdict.reason
