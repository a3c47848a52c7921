"""``wanbuild convert`` and recipes refuse every broken checkpoint, by code and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hostile.changes import (
    INDEX,
    JSON_FILES,
    SHARD,
    WEIGHTS,
    Change,
    Checkpoint,
    Row,
    fields,
    index,
    tensors,
)
from hostile.checkpoints import ROWS
from hostile.refusal import check_named, first_of_each, refusal
from wanbuild.cli import wanbuild
from wancli.console import run


def test_no_two_rows_are_the_same() -> None:
    assert len({(row.name, row.base) for row in ROWS}) == len(ROWS) >= 600


def kind(row: Row) -> tuple[str, str]:
    """The code, and what has made the row's change."""
    return row.code, getattr(row.change, "__qualname__", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), first_of_each(ROWS, kind))
def test_a_broken_checkpoint_is_refused(
    number: int,
    row: Row,
    good_checkpoints: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By ``wanbuild convert``, and every fourth by a recipe."""
    source, artifact, recipe = tmp_path / "source", tmp_path / "artifact", tmp_path / "recipe.toml"
    row.change(Checkpoint(good_checkpoints[row.base], source, row.name))
    arguments: tuple[object, ...] = ("convert", source, "--artifact", artifact)
    if number % 4 == 0:
        recipe.write_text(f'source = "{source}"\nartifact = "{artifact}"\n')
        arguments = ("build", recipe)
    error = refusal(capsys, tmp_path, wanbuild, arguments, 4)
    check_named(error, row.code, row.values)


ACCEPTED: tuple[tuple[str, Change], ...] = (
    ("experts", index(expand_timesteps=False)),
    ("experts", index(boundary_ratio=0)),
    ("experts", index(boundary_ratio=1.0, _name_or_path="a/b", image_encoder=[None, None])),
    ("experts", fields("transformer_2/config.json", _diffusers_version="0.36.0")),
    ("ti2v", index(transformer_2=..., boundary_ratio=...)),
)
"""What entries may be left out, and both ends of the boundary's range."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ACCEPTED)))
def test_a_published_form_is_accepted(
    number: int, good_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    base, change = ACCEPTED[number]
    change(Checkpoint(good_checkpoints[base], tmp_path / "source", "good"))
    arguments = ["convert", str(tmp_path / "source"), "--artifact", str(tmp_path / "artifact")]
    assert run(wanbuild, arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "float16", "bfloat16", "sharded"])
def test_what_is_written_anew_unchanged_converts(
    base: str, good_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    """So the refusals above are of the changes."""
    checkpoint = Checkpoint(good_checkpoints[base], tmp_path / "source", "good")
    for file in [SHARD] if base == "sharded" else WEIGHTS.values():
        tensors(file, lambda found, checkpoint: None)(checkpoint)
    for file in [INDEX, *JSON_FILES] if base == "sharded" else JSON_FILES:
        fields(file)(checkpoint)
    arguments = ["convert", str(tmp_path / "source"), "--artifact", str(tmp_path / "artifact")]
    assert run(wanbuild, arguments) == 0
