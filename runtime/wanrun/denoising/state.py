"""The state that the denoising loop passes from one program call to the next."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.programs import Program, aval
from wanrun.errors import WanError
from wanrun.weights.buffers import DTYPES

State = Mapping[str, Any]
"""Arrays, or nested dicts of arrays, by name: ``latents`` (B, C, T, h, w), and the programs' other state."""


def start_state(noise: np.ndarray, program: Program) -> dict[str, Any]:
    """Returns the state for the first call: the loop's donated inputs, with names and shapes of the manifest.

    ``latents`` is the noise, float32 (B, C, T, h, w), in the program's dtype; every other array, a solver's
    history, is zeros. Where the noise has more latent frames than the program's latents, so has what has
    their shape.
    """
    carried = {name: program.avals["inputs"][name] for name in program.donated}
    shapes = {aval(carried["latents"])[1]: noise.shape}
    state = {name: zeros(avals, shapes) for name, avals in carried.items() if name != "latents"}
    return {"latents": noise.astype(_dtype(carried["latents"]), copy=False), **state}


def zeros(avals: Any, shapes: Mapping[tuple[int, ...], tuple[int, ...]] = MappingProxyType({})) -> Any:
    """Returns zeros for a manifest's avals: text such as ``float32[2,3]``, or nested dicts of text.

    ``shapes`` are others by the shape that they replace.
    """
    if isinstance(avals, Mapping):
        return {name: zeros(item, shapes) for name, item in avals.items()}
    shape = tuple(aval(avals)[1])
    return np.zeros(shapes.get(shape, shape), _dtype(avals))


def _dtype(text: str) -> np.dtype[Any]:
    name = aval(text)[0]
    return DTYPES.get(name) or np.dtype(name)


def with_noise(latents: Any, weight: float, noise: np.ndarray) -> np.ndarray:
    """Returns latents (B, C, T, h, w) + weight·noise in the same dtype; computes on the host in float32."""
    on_host = np.asarray(latents)
    return (on_host.astype(np.float32) + np.float32(weight) * noise).astype(on_host.dtype, copy=False)


def final_latents(state: State) -> np.ndarray:
    """Returns a state's latents on the host, float32. Raises WanError if they are not finite."""
    check_finite(state, "at the end")
    return np.asarray(state["latents"]).astype(np.float32, copy=False)


def check_finite(state: State, when: str) -> None:
    """Raises WanError for NaN or infinity in the latents, before anything is decoded from them."""
    latents = np.asarray(state["latents"]).astype(np.float32, copy=False)
    wrong = latents.size - np.count_nonzero(np.isfinite(latents))
    if wrong:
        raise WanError(
            "not_finite",
            f"the latents are not finite {when}",
            expected="numbers",
            found=f"{wrong} NaN or infinite of {latents.size} values",
            remedy="lower the strengths of LoRAs, check the weights with wanbuild verify, or build with "
            "--dtype float32",
        )
