"""What sessions share: made once for an opened artifact, and let go of as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from wanrun.generation.last_encoded import LastEncoded
from wanrun.generation.shared import Shared
from wanrun.media.types import Inputs


class Closes:
    """Notes that it is closed."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.close = lambda: order.append(name)


def test_all_is_let_go_of_and_jax_s_flags_last() -> None:
    order: list[str] = []
    weights, executables, texts, device = (
        cast(Any, Closes(name, order)) for name in ("weights", "executables", "texts", "device")
    )
    last, inputs = LastEncoded(), Inputs()
    last.keep(inputs, ("digest",), {"condition": 1})
    opened = cast(Any, SimpleNamespace(device=device))
    Shared(opened, weights, executables, texts, last).close()
    assert sorted(order) == ["device", "executables", "texts", "weights"]
    assert order[-1] == "device"  # executables that are being loaded need its flags
    assert last.find(inputs, ("digest",)) is None
