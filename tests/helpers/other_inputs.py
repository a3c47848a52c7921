"""Programs that make something else of an input than they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wanrun.weights.bound_programs import Programs


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
