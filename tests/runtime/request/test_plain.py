"""NumPy's values and paths, as plain values of Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanrun.request.plain import as_plain


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ((np.int32(64), 32), (64, 32)),
        ([np.float64(1.5), "a"], [1.5, "a"]),
        (Path("a/b"), "a/b"),
        ("text", "text"),
        (None, None),
        (7, 7),
    ],
)
def test_values(value: Any, plain: Any) -> None:
    found = as_plain(value)
    assert found == plain
    assert type(found) is type(plain)
    if isinstance(plain, list | tuple):
        assert [type(one) for one in found] == [type(one) for one in plain]
