"""Programs that combine passes otherwise than a guider says are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.other_inputs import take_otherwise
from wanrun.errors import VerificationError
from wanrun.replay.golden import Replay, replayed


@pytest.fixture(scope="module")
def opened(media_toy: Callable[[str], tuple[Path, Path]]) -> Iterator[tuple[wanrun.Pipeline, Replay]]:
    """A pipeline of a profile with all forms of the loop and all guiders, and its replay."""
    with wanrun.load(media_toy("wan2.2-i2v")[1], embeddings="none") as pipeline:
        yield pipeline, replayed(pipeline, pipeline.environment)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "key", "change", "message"),
    [
        ("step", "guidance_projection", np.zeros_like, "denoise_step does not combine passes as cfg-zero"),
        ("step", "guidance_projection", np.ones_like, "guidance_projection changes nothing"),
        ("step", "skip_scale", np.square, "denoise_step does not combine passes as skip-layer"),
        ("step", "skip_layers", np.ones_like, "denoise_step does not combine passes as skip-layer"),
        ("step", "skip_layers", np.zeros_like, "skip_layers changes nothing"),
        ("stream", "guidance_projection", np.zeros_like, "leave does not combine passes as cfg-zero"),
        ("stream", "skip_scale", np.square, "leave does not combine passes as skip-layer"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_changed_guider(
    form: str,
    key: str,
    change: Callable[[Any], Any],
    message: str,
    opened: tuple[wanrun.Pipeline, Replay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that make something else of an input than they should."""
    pipeline, replay = opened
    take_otherwise(monkeypatch, key, change)
    with pytest.raises(VerificationError, match=message):
        replay.prove(pipeline.session(pipeline.profile), (form,))
