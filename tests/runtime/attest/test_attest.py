"""Executables that look right, with digests that fit, are found out by what is compiled here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.artifacts import far_toy
from helpers.damage import PROFILE, flip, own
from helpers.elsewhere import (
    TARGET,
    build_elsewhere,
    compiled_of,
    doctored,
    impostor,
    leave_to_the_chip,
    put_executable,
)
from helpers.kernels import put_attention
from helpers.wrong_programs import DOCTORED
from wanbuild.models.attention import BlockedAttention
from wanbuild.models.blocks import WanAttention
from wanbuild.programs import denoiser
from wanrun.attest import attest
from wanrun.attest.attest import attested
from wanrun.executables import executables
from wanrun.files import user_cache
from wanrun.generation.load import load
from wanrun.trust.trial import CHILD, run_trial
from wanrun.trust.verdict import Verdict

# --- attest ---


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What was compiled here, by the text of the program."""
    return {}


@pytest.fixture(autouse=True)
def compile_once(compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles each program once for all tests."""
    own_compiler = executables.compile_here

    def compile_here(lowered: Any) -> Any:
        text = lowered.as_text()
        if text not in compiled:
            compiled[text] = own_compiler(lowered)
        return compiled[text]

    monkeypatch.setattr(executables, "compile_here", compile_here)


@pytest.fixture
def outcome(elsewhere: Path) -> Callable[[], Verdict]:
    """Attests the artifact; what is told on the way holds if a program ends the process."""

    def call() -> Verdict:
        told: list[Verdict] = []
        verdict = attested(elsewhere, TARGET, PROFILE, told.append)
        assert all(not one.passed and one.keep == ("compiled" not in one.reason) for one in told)
        assert len({one.reason for one in told}) == len(told)
        return verdict

    return call


def kept() -> int:
    """How many programs that were compiled here are kept."""
    return len(list((user_cache() / "executables").rglob("*.executable")))


@pytest.mark.thorough
def test_right_ones_pass(outcome: Callable[[], Verdict]) -> None:
    """The entries have names that JAX does not look for: its own keys are asked for."""
    verdict = outcome()
    assert verdict.passed and verdict.native == () and kept() == 0
    assert verdict.device == {"device_kind": "cpu", "platform_version": "cpu"}


@pytest.mark.thorough
def test_other_programs_of_the_same_signature(outcome: Callable[[], Verdict], elsewhere: Path) -> None:
    """And bytes that are none. What comes after is right: it is given what was compiled here has made."""
    put_executable(elsewhere, "prepare", b"no executable")
    for name in ("decode_video", "encode_text_128"):
        put_executable(elsewhere, name, impostor(elsewhere, name))
    verdict = outcome()
    assert verdict.passed and kept() == len(verdict.native) == 3
    assert set(verdict.native) == {"decode_video", "encode_text_128", "prepare"}


def one_key_dropped() -> AbstractContextManager[Any]:
    """Attention of the 72 tokens to 71 of them."""
    whole = BlockedAttention.__call__

    def attend(self: BlockedAttention, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        left = slice(None) if k.shape[1] != 72 else slice(1, None)
        return whole(self, q, k[:, left], v[:, left], mask)

    return mock.patch.object(BlockedAttention, "__call__", attend)


def rows_permuted() -> AbstractContextManager[Any]:
    """The rows of all layers' values lie in another order."""
    right = WanAttention.value
    return mock.patch.object(WanAttention, "value", lambda self, x: jnp.roll(right(self, x), 1, -1))


def update(wrong: str) -> AbstractContextManager[Any]:
    return mock.patch.object(denoiser, "solver_step", DOCTORED[wrong])


DOCTORED_PROGRAMS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "denoise_loop": lambda: update("predictor without m1"),
    "denoise_step": one_key_dropped,
    "prepare": rows_permuted,
}


@pytest.mark.thorough
def test_doctored_programs(outcome: Callable[[], Verdict], elsewhere: Path) -> None:
    """Which a video of few steps would not show, or one without a recorded result."""
    for name, patch in DOCTORED_PROGRAMS.items():
        put_executable(elsewhere, name, doctored(elsewhere, name, patch()))
    verdict = outcome()
    assert verdict.passed and kept() == len(verdict.native) == len(DOCTORED_PROGRAMS)
    assert set(verdict.native) == set(DOCTORED_PROGRAMS)


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_here_is_no_matter_of_executables(
    outcome: Callable[[], Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lowered: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(executables, "compile_here", refuse)
    verdict = outcome()
    assert not verdict.passed and not verdict.keep and "no such instruction" in verdict.reason


def test_another_chip(artifact: Path) -> None:
    build_elsewhere(artifact, device_kind="TPU v9", device_kinds=["TPU v9"])
    verdict = attested(artifact, TARGET, PROFILE, print)
    assert not verdict.passed and not verdict.keep and "TPU v9" in verdict.reason


@pytest.mark.slow
def test_damaged_weights_are_no_matter_of_executables(
    outcome: Callable[[], Verdict], elsewhere: Path
) -> None:
    own(elsewhere, "weights")
    flip(max((elsewhere / "weights/vae").rglob("c/*/*"), key=lambda path: path.stat().st_size), 3)
    verdict = outcome()
    assert not verdict.passed and not verdict.keep and "vae" in verdict.reason


@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "left_out"), [(-1.0, False), (-1.05, False), (-1.05, True)])
def test_a_kernel_is_compared_with_its_other_form(
    artifact: Path, scale: float, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled here of the program itself has the same fault, so the target is refused."""
    own(artifact, "programs")
    put_attention(artifact, kernel=lambda q: q * scale)
    build_elsewhere(artifact)
    put_executable(artifact, "attention", compiled_of(artifact, "attention"))
    if left_out:
        leave_to_the_chip(artifact, "attention")
    monkeypatch.setattr(attest, "attention_inputs", lambda avals: [{"q": np.arange(3, dtype=np.float32)}])
    verdict = attested(artifact, TARGET, PROFILE, lambda told: None)
    assert verdict.passed == (scale == -1) and verdict.keep and verdict.native == ()
    assert verdict.passed or "attention differs" in verdict.reason


@pytest.mark.thorough
def test_all_that_makes_and_keeps_chunks_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    with load(far_toy(tmp_path_factory)[1], embeddings="none") as pipeline:
        attest.run_all(pipeline, streams=False)  # it raises for what has not run


# --- main ---


@pytest.mark.slow
def test_a_verdict_is_written(tmp_path: Path) -> None:
    arguments = ["--artifact", str(tmp_path), "--target", "v9", "--profile", "1x1x1"]
    verdict = run_trial(arguments)
    assert not verdict.passed and not verdict.keep
    assert verdict.reason.startswith(f"{tmp_path} is not an artifact")


@pytest.mark.slow
def test_a_wrong_command_line_is_no_verdict(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome.json"
    done = subprocess.run([*CHILD, "--outcome", outcome], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--artifact" in done.stderr and not outcome.exists()


@pytest.mark.slow
def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Whose end of the child's standard input is closed by the system, in whatever way it ends."""
    code = (
        "import sys, threading, time\nfrom wanrun.attest.__main__ import _end_with_parent\n"
        "threading.Thread(target=_end_with_parent, daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"up\n" and child.poll() is None
    child.stdin.close()
    assert child.wait(20) == 1
    child.stdout.close()
