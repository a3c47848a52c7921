"""Compares a program that was compiled here with the artifact's executable, and keeps the faster one.

Both run with the same random inputs. What was compiled here is taken only where the results agree.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.programs import Profile, Program
from wanrun.artifact.roles import ROLES
from wanrun.executables.tolerance import TOLERANCES, levels_apart, most_levels, relative_error
from wanrun.timing.clock import now

CALLS = 5
"""Timed calls of each executable, after one that is not timed."""

DRAWN = 65_537
"""Random values that are drawn; larger arrays repeat them."""

AUTOTUNING = ("autotun", "triton_gemm")
"""Parts of the names of the compiler's options that are for where there is no chip to tune kernels on."""


def is_tuned(program: Program) -> bool:
    """Whether ``--retune`` compares a program.

    The bits of embeddings, which are cached, are those of the artifact's text encoder. Programs that spread
    weights run once.
    """
    return ROLES[program.role].when not in ("prompts", "loading")


def tolerance_of(profile: Profile) -> float:
    """Returns the relative error that is allowed between two executables of a profile's programs."""
    return max(TOLERANCES[dtype] for dtype in (profile.options.dtype, profile.options.vae_dtype))


def tuned_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a target's compiler options for a compilation on the chip, where autotuning is possible."""
    return {name: value for name, value in options.items() if not any(part in name for part in AUTOTUNING)}


@dataclass(frozen=True)
class Outcome:
    """What came of a comparison.

    Args:
        seconds: of one call of what was compiled here.
        built_seconds: of one call of the artifact's executable.
        difference: what differs too much, in words; empty where the results agree.
    """

    seconds: float
    built_seconds: float
    difference: str

    @property
    def better(self) -> bool:
        """Whether what was compiled here is taken."""
        return not self.difference and self.seconds < self.built_seconds


Call = Callable[..., Any]


class Contest:
    """A program in two forms, of which the first call finds the better one.

    Args:
        built: the artifact's executable, by names of arguments.
        weights: names of the arguments that are weights: both get the given ones.
        decided: is told the outcome once.
    """

    def __init__(
        self,
        built: Call,
        here: Call,
        weights: Collection[str],
        tolerance: float,
        decided: Callable[[Outcome], None],
    ) -> None:
        self._built, self._here, self._weights = built, here, weights
        self._tolerance, self._decided = tolerance, decided
        self._lock = threading.Lock()
        self._winner: Call | None = None

    def __call__(self, **arguments: Any) -> Any:
        """Runs the better form."""
        with self._lock:
            if self._winner is None:
                outcome = self._compare(arguments)
                self._winner = self._here if outcome.better else self._built
                self._decided(outcome)
        return self._winner(**arguments)

    def _compare(self, arguments: Mapping[str, Any]) -> Outcome:
        import jax

        given = {name: value for name, value in arguments.items() if name not in self._weights}
        weights = {name: value for name, value in arguments.items() if name in self._weights}
        drawn = jax.tree.map(drawn_like, given)

        def run(form: Call) -> tuple[Any, float]:
            # Donated inputs are gone after a call: every call gets its own.
            inputs = jax.block_until_ready(jax.tree.map(_placed_like, drawn, given))
            start = now()
            outputs = jax.block_until_ready(form(**weights, **inputs))
            return outputs, now() - start

        results, seconds = [], []
        for form in (self._built, self._here):
            results.append(jax.tree.map(np.asarray, run(form)[0]))
            seconds.append(statistics.median(run(form)[1] for _ in range(CALLS)))
        return Outcome(seconds[1], seconds[0], first_difference(results[0], results[1], self._tolerance))


def first_difference(built: Any, here: Any, tolerance: float) -> str:
    """Says by how much the first outputs differ that do not agree, of two trees; empty where all do."""
    import jax

    said = jax.tree.map(lambda one, other: difference(one, other, tolerance), built, here)
    return next(filter(None, jax.tree.leaves(said)), "")


def difference(built: np.ndarray, here: np.ndarray, tolerance: float) -> str:
    """Says by how much two results of one program differ; empty where they agree."""
    if built.dtype == np.uint8:
        apart, most = levels_apart(built, here), most_levels(tolerance)
        return "" if apart <= most else f"by {apart:.3g} levels, at most {most:.3g}"
    first, second = built.astype(np.float64), here.astype(np.float64)
    if np.array_equal(first, second, equal_nan=True):
        return ""
    error = relative_error(second, first)
    return "" if error <= tolerance else f"by {error:.1e} relative, at most {tolerance:g}"


def drawn_like(value: Any) -> np.ndarray:
    """Returns random values of an array's shape and dtype, normal or bytes; a copy of scalars and rows."""
    import jax

    array = np.asarray(value)
    if array.ndim < 2 or not (array.dtype == np.uint8 or jax.dtypes.issubdtype(array.dtype, np.floating)):
        return array.copy()
    random = np.random.default_rng(array.ndim)
    if array.dtype == np.uint8:
        return np.resize(random.integers(0, 256, DRAWN, dtype=np.uint8), array.shape)
    return np.resize(random.standard_normal(DRAWN, np.float32), array.shape).astype(array.dtype)


def _placed_like(drawn: np.ndarray, value: Any) -> Any:
    """Puts drawn values where an argument lies."""
    import jax

    return jax.device_put(drawn.copy(), value.sharding) if isinstance(value, jax.Array) else drawn.copy()
