"""What is taken for an artifact and is none: one line says what it is, and the command that leads on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.artifact.wrong_path import wrong_path
from wanrun.errors import ArtifactError


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


CONVERT, TO = "wanbuild convert", "--artifact DIR"


@pytest.mark.parametrize(
    ("name", "make", "found", "remedy"),
    [
        ("a", lambda path: None, "no such folder", "wanbuild convert"),
        ("a", Path.mkdir, MANIFEST, "wanbuild convert"),
        ("a", lambda path: touch(path / "model_index.json"), "checkpoint", f"{CONVERT} a {TO}"),
        ("a", lambda path: touch(path / "x.safetensors"), "folder of weights", f"{CONVERT} CHECKPOINT {TO}"),
        ("x.safetensors", touch, "file of weights", f"{CONVERT} CHECKPOINT {TO}"),
        ("a.toml", touch, "recipe", "wanbuild build a.toml"),
        ("a.mp4", touch, "a file", "wanbuild convert"),
        ("Wan-AI/Wan2.1", lambda path: None, "hub id", f"{CONVERT} Wan-AI/Wan2.1 {TO}"),
        ("Wan-AI/Wan2.1", lambda path: None, "no such folder", "hf://Wan-AI/Wan2.1"),
    ],
)
def test_what_it_is_and_what_to_do(
    name: str,
    make: Callable[[Path], object],
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path(name))
    with refuses("wrong_kind", ArtifactError, what=name, found=found, remedy=remedy) as refused:
        read_manifest(Path(name))
    assert wrong_path(Path(name), MANIFEST) == (refused.value.found, refused.value.remedy)
