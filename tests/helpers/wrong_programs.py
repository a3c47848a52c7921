"""Programs and updates of a solver's state that compute something else than they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from wanbuild.programs.denoiser import solver_step
from wanrun.denoising.solvers import COLUMNS
from wanrun.weights.bound_programs import Programs


def _without(column: str) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The update whose coefficient of this column is taken as zero."""

    def update(x: Any, v: Any, history: Any, coefficients: Any) -> tuple[Any, dict[str, Any]]:
        return solver_step(x, v, history, coefficients.at[COLUMNS.index(column)].set(0.0))

    return update


def _forgets(x: Any, v: Any, history: Any, coefficients: Any) -> tuple[Any, dict[str, Any]]:
    x, past = solver_step(x, v, history, coefficients)
    return x, {name: 0 * array for name, array in past.items()}


def _exchanges(x: Any, v: Any, history: Any, coefficients: Any) -> tuple[Any, dict[str, Any]]:
    given = {"last": history["m1"], "m1": history["m2"], "m2": history["last"]}
    return solver_step(x, v, given, coefficients)


DOCTORED: Mapping[str, Callable[..., tuple[Any, dict[str, Any]]]] = MappingProxyType(
    {
        "predictor without m1": _without("p_1"),
        "corrector without m1": _without("c_1"),
        "corrector without m2": _without("c_2"),
        "history always zero": _forgets,
        "history exchanged": _exchanges,
    }
)


def take_otherwise(
    monkeypatch: pytest.MonkeyPatch, key: str, change: Callable[[Any], Any], only: str | None = None
) -> None:
    """Has all programs, or only one, take another value of one of their inputs."""
    own = Programs.bound

    def bound(self: Programs, name: str, *loras: Any, **components: str) -> Any:
        right = own(self, name, *loras, **components)
        if only not in (None, name):
            return right

        def changed(**given: Any) -> Any:
            other = {name: change(value) for name, value in given.items() if name == key}
            return right(**{**given, **other})

        return changed

    monkeypatch.setattr(Programs, "bound", bound)
