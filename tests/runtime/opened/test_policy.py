"""The choices of how an artifact is loaded: an unknown one ends with the list of those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.errors import UsageError
from wanrun.opened.policy import LoadPolicy
from wanrun.rows import Row, rows_of


@pytest.mark.parametrize("row", [row for row in rows_of(LoadPolicy) if row.choices], ids=lambda row: row.name)
def test_choices(row: Row) -> None:
    assert getattr(LoadPolicy(), row.name) == row.choices[0]
    for choice in row.choices:
        LoadPolicy(**{row.name: choice}).check()
    choices = ", ".join(row.choices)
    with refuses("invalid_value", what=row.name, expected=choices):
        LoadPolicy(**{row.name: "High"}).check()


def test_weights_have_to_be_there(tmp_path: Path) -> None:
    LoadPolicy(weights=str(tmp_path)).check()
    with pytest.raises(UsageError, match="missing"):
        LoadPolicy(weights=str(tmp_path / "missing")).check()


def test_low_memory() -> None:
    assert LoadPolicy(memory="low").low_memory and not LoadPolicy().low_memory
