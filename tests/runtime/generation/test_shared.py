"""What sessions share: made once for an opened artifact, and let go of as a whole."""

from __future__ import annotations

from typing import Any, cast

from wanrun.generation.conditioning import Encoded, LastEncoded
from wanrun.generation.shared import Shared
from wanrun.media.types import Inputs


class Closes:
    """Notes that it is closed."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.close = lambda: order.append(name)


def test_all_is_let_go_of() -> None:
    order: list[str] = []
    weights, texts = (cast(Any, Closes(name, order)) for name in ("weights", "texts"))
    last, inputs = LastEncoded(), Inputs()
    last[inputs] = {("digest",): Encoded({}, {"condition": 1})}
    Shared(weights, texts, last).close()
    assert sorted(order) == ["texts", "weights"]
    assert len(last) == 0
