"""Proves what steps make of their passes with each guider that a profile is built for.

``cfg`` is proven by its scales. From the passes that those tell apart follows what another guider makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from wanrun.artifact.guiders import SKIPPED_LAYERS, GuiderName
from wanrun.artifact.roles import RoleName
from wanrun.errors import VerificationError
from wanrun.generation.sampler import Sampler
from wanrun.replay.random_steps import LoopStart, velocities

HALF = 0.5
"""Of guidance: the mean of both passes, so that each counts as much as the other."""

_ROUNDINGS = 8
"""Of a stored state, in what is expected and what is found: at most so many, each with its factor."""

_Seen = Callable[..., np.ndarray]
"""Returns the velocities of all experts with a guider, float64; keywords are those of ``velocities``."""

_Expected = Iterator[tuple[np.ndarray, np.ndarray]]
"""Velocities that a guider should give, and that it gives."""


def prove_guiders(
    sampler: Sampler,
    start: LoopStart,
    form: str,
    maker: RoleName,
    name: str,
    half: np.ndarray,
    one: np.ndarray,
    most: float,
) -> None:
    """Proves that a program which makes steps combines their passes as the profile's guiders do.

    ``half`` are its velocities with ``cfg`` and ``HALF``, ``one`` those of only the positive prompt, float64
    (experts, B, C, T, h, w); ``most`` is the relative error that is allowed. Raises VerificationError, naming
    the program and the guider.
    """
    options = sampler.profile.options
    for guider in options.guiders:

        def seen(guider: GuiderName = guider, **attributes: Any) -> np.ndarray:
            return velocities(sampler, start, form, maker, HALF, name=name, guider=guider, **attributes)

        eps = float(ml_dtypes.finfo(options.scheduler_dtype).eps)
        stored = _ROUNDINGS * eps * (np.linalg.norm(start.noise) + np.linalg.norm(half))
        layers = _layers(sampler)
        for expected, found in _PROOFS[guider](seen, half, one, layers):
            error, allowed = np.linalg.norm(found - expected), most * np.linalg.norm(expected) + stored
            if not error <= allowed:
                raise VerificationError(
                    "other_results",
                    f"{name} does not combine passes as {guider} does",
                    expected=f"at most {allowed:.1e} off",
                    found=f"{error:.1e}",
                    remedy="build the artifact again",
                )


def _projected(seen: _Seen, half: np.ndarray, one: np.ndarray, layers: int) -> _Expected:
    """CFG-Zero*: the negative pass is scaled until it is the positive one's projection on it."""
    negative = (half - HALF * one) / (1 - HALF)
    axes = tuple(range(2, half.ndim))
    product, square = (np.sum(other * negative, axes, keepdims=True) for other in (one, negative))
    found = seen()
    yield (1 - HALF) * product / (square + 1e-8) * negative + HALF * one, found
    if np.array_equal(found, half):
        raise VerificationError("other_results", "guidance_projection changes nothing of what steps return")


def _skipping(seen: _Seen, half: np.ndarray, one: np.ndarray, layers: int) -> _Expected:
    """Skip-layer guidance: linear in its scale, and nothing where no layer is skipped."""
    middle = _middle(layers)
    first, none = seen(skip_scale=1.0, skip_layers=middle), seen(skip_scale=1.0)
    yield half, none
    yield half - 2 * (first - half), seen(skip_scale=-2.0, skip_layers=middle)
    if np.array_equal(first, none):
        raise VerificationError("other_results", f"{SKIPPED_LAYERS} changes nothing of what steps return")


_PROOFS: Mapping[str, Callable[[_Seen, np.ndarray, np.ndarray, int], _Expected]] = MappingProxyType(
    {"cfg-zero": _projected, "skip-layer": _skipping}
)


def guidances(sampler: Sampler) -> Iterator[dict[str, Any]]:
    """Yields keywords of ``DrawnSteps.drawn``, a guider of a profile each, with all its passes."""
    yield {}
    if sampler.profile.guidance:
        for guider in sampler.profile.options.guiders:
            skipping = {"skip_scale": 1.0, "skip_layers": _middle(_layers(sampler))}
            yield {"guider": guider, **(skipping if guider == "skip-layer" else {})}


def _layers(sampler: Sampler) -> int:
    """Returns how many layers can be skipped."""
    return sum(sampler.guiding.get(SKIPPED_LAYERS, ()))


def _middle(layers: int) -> tuple[int, ...]:
    return (layers // 2,)
