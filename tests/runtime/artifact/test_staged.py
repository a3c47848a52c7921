"""Staged parameters: the shape of their rows over devices, and the names of the programs that spread them."""

from __future__ import annotations

import pytest

from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.staged import padded_shape, spread_name


@pytest.mark.parametrize(
    ("shape", "rows", "devices", "padded"),
    [
        ((40, 8, 16), 40, 8, (40, 8, 16)),
        ((30, 8, 16), 30, 8, (32, 8, 16)),
        ((3, 8), 3, 8, (8, 8)),
        ((3, 8), 3, 2, (4, 8)),
        ((12, 8), 6, 4, (16, 8)),
        ((12, 8), 6, 3, (12, 8)),
        ((12,), 1, 4, (48,)),
    ],
)
def test_every_device_has_the_same_whole_number_of_rows(
    shape: tuple[int, ...], rows: int, devices: int, padded: tuple[int, ...]
) -> None:
    assert padded_shape(ArrayLayout(shape, "float32", rows, 1), devices) == padded


def test_experts_share_a_program() -> None:
    names = ["transformer", "transformer_2", "vae"]
    assert [spread_name(name) for name in names] == ["spread_transformer", "spread_transformer", "spread_vae"]
