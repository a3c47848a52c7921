"""The choices of how an artifact is loaded: an unknown one ends with the list of those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.opened.policy import EMBEDDINGS, MEMORY, TEXT_ENCODERS, TRANSFER, VERIFY, LoadPolicy


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("verify", VERIFY),
        ("memory", MEMORY),
        ("transfer", TRANSFER),
        ("text_encoder", TEXT_ENCODERS),
        ("embeddings", EMBEDDINGS),
    ],
)
def test_choices(name: str, choices: tuple[str, ...]) -> None:
    assert getattr(LoadPolicy(), name) == choices[0]
    for choice in choices:
        assert getattr(LoadPolicy(**{name: choice}), name) == choice
    with pytest.raises(UsageError, match=f"{name} cannot be 'High'; expected one of {', '.join(choices)}$"):
        LoadPolicy(**{name: "High"})


def test_weights_have_to_be_there(tmp_path: Path) -> None:
    assert LoadPolicy(weights=str(tmp_path)).weights == str(tmp_path)
    with pytest.raises(UsageError, match="missing"):
        LoadPolicy(weights=str(tmp_path / "missing"))


def test_low_memory() -> None:
    assert LoadPolicy(memory="low").low_memory and not LoadPolicy().low_memory
