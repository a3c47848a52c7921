"""What the denoising loop carries from one call of a program to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from wanrun.artifact.programs import Program, aval
from wanrun.errors import ArtifactError, WanError
from wanrun.loading.buffers import DTYPES

State = Mapping[str, Any]
"""By name, arrays or nested dicts of arrays: ``latents`` (B, C, T, h, w), and what else programs carry."""


def start_state(noise: np.ndarray, programs: Iterable[Program]) -> dict[str, Any]:
    """What the first call takes, of every program that is going to be called.

    A program's state is its donated inputs, by the names and shapes in the manifest. A solver's history is
    such an input; so is the residual that a cheaper program reuses.

    Args:
        noise: float32 (B, C, T, h, w).
        programs: the records of the programs.

    Returns:
        ``latents``: the noise in the programs' dtype; everything else: zeros.

    Raises:
        ArtifactError: if two programs have different arrays of the same name.
    """
    carried: dict[str, Any] = {}
    for program in programs:
        for name in (program.inputs[index] for index in program.donate):
            avals = program.avals["inputs"][name]
            if carried.setdefault(name, avals) != avals:
                raise ArtifactError(
                    f"the programs of the denoising loop do not carry the same {name}",
                    expected=repr(carried[name]),
                    found=repr(avals),
                    remedy="run wanbuild compile",
                )
    state = {name: _zeros(avals) for name, avals in carried.items() if name != "latents"}
    return {"latents": noise.astype(_dtype(carried["latents"]), copy=False), **state}


def _zeros(avals: Any) -> Any:
    """Zeros of avals as the manifest has them: text, or nested dicts of text."""
    if isinstance(avals, Mapping):
        return {name: _zeros(item) for name, item in avals.items()}
    return np.zeros(aval(avals)[1], _dtype(avals))


def _dtype(text: str) -> np.dtype[Any]:
    name = aval(text)[0]
    return DTYPES.get(name) or np.dtype(name)


def with_noise(latents: Any, weight: float, noise: np.ndarray) -> np.ndarray:
    """Latents (B, C, T, h, w) + weight·noise, computed on the host in float32, in the latents' dtype."""
    on_host = np.asarray(latents)
    return (on_host.astype(np.float32) + np.float32(weight) * noise).astype(on_host.dtype, copy=False)


def final_latents(state: State) -> np.ndarray:
    """The latents of a state on the host, float32.

    Raises:
        WanError: if they are not finite.
    """
    check_finite(state, "at the end")
    return np.asarray(state["latents"]).astype(np.float32, copy=False)


def check_finite(state: State, when: str) -> None:
    """Raises WanError for NaN or infinity: checked early, and before anything is decoded from them."""
    latents = np.asarray(state["latents"]).astype(np.float32, copy=False)
    wrong = latents.size - np.count_nonzero(np.isfinite(latents))
    if wrong:
        raise WanError(
            f"the latents are not finite {when}",
            expected="numbers",
            found=f"{wrong} NaN or infinite of {latents.size} values",
            remedy="check the weights with wanbuild verify, or build with --dtype float32",
        )
